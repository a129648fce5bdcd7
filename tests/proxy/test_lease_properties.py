"""The shell under random arrivals, cancellations, timeouts, failures and releases, in virtual time."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import HoldExpired, LeaseCancelled, LeaseClosed, QueueFull, WaitTooLong
from proxy.lease import Hold, Lease, LeaseEvent, LeaseSettings
from proxy.line import Mode, Ticket
from tests.proxy import virtual
from tests.proxy.lines import settle

KINDS = [
    (Mode.READ, "chat"),
    (Mode.READ, "vision"),
    (Mode.WRITE, "tts"),
    (Mode.WRITE, "clone"),
    (Mode.NONE, "embed"),
    (Mode.READ, "broken"),
]
ENDS = {"released", "rejected", "timeout", "cancelled"}


class Broken(Exception):
    """What `prepare` raises for one of the models."""


Action = Literal["come", "impatient", "finish", "fail", "hang up", "cancel", "open"]
ACTIONS: list[Action] = ["come", "come", "come", "impatient", "finish", "finish", "fail", "hang up", "cancel", "open"]
SCRIPTS = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 1000), st.sampled_from([0.0, 0.0, 1.0, 4.0])), max_size=50
)


@dataclass(eq=False)
class Job:
    """A task that holds until it is told how to end."""

    hold: Hold
    told: "asyncio.Future[Exception | None]"
    task: "asyncio.Task[None] | None" = None
    inside: bool = False


class World:
    """A lease, its jobs, and what its listener has heard."""

    def __init__(self, order: Any) -> None:
        limits = LeaseSettings(order=order, max_wait=30.0, max_hold=20.0, max_waiting=8, slow_wait=1e9)
        self.heard: dict[Ticket, list[str]] = {}
        self.jobs: list[Job] = []
        loop = asyncio.get_running_loop()
        self.lease = Lease("gpu0", limits, clock=loop.time, listeners=[self.listen], prepare=self.prepare)

    def listen(self, event: LeaseEvent) -> None:
        self.heard.setdefault(event.ticket, []).append(event.kind)

    async def prepare(self, ticket: Ticket) -> None:
        await asyncio.sleep(0)
        if ticket.model == "broken":
            raise Broken

    def come(self, which: int, max_wait: float | None = None) -> None:
        mode, model = KINDS[which % len(KINDS)]
        limit = 2 if which % 5 == 0 else None
        hold = self.lease.hold(
            id=str(len(self.jobs)), model=model, group="g", mode=mode, limit=limit, max_wait=max_wait
        )
        job = Job(hold, asyncio.get_running_loop().create_future())
        job.task = asyncio.create_task(self.work(job))
        self.jobs.append(job)

    async def work(self, job: Job) -> None:
        async with job.hold:
            job.inside = True
            self.look()
            try:
                if (error := await job.told) is not None:
                    raise error
            finally:
                job.inside = False

    def look(self) -> None:
        modes = [job.hold.ticket.mode for job in self.jobs if job.inside and job.hold.ticket.mode is not Mode.NONE]
        assert len(modes) < 2 or set(modes) == {Mode.READ}, "a writer overlaps somebody"
        for job in self.jobs:
            assert not job.inside or job.hold.ticket.granted is not None

    async def act(self, action: Action, which: int) -> None:
        inside = [job for job in self.jobs if job.inside and not job.told.done()]
        alive = [job for job in self.jobs if job.task is not None and not job.task.done()]
        match action:
            case "come":
                self.come(which)
            case "impatient":
                self.come(which, max_wait=float(which % 4))
            case "finish" | "fail" if inside:
                inside[which % len(inside)].told.set_result(Broken() if action == "fail" else None)
            case "open" if inside:
                inside[which % len(inside)].hold.opened()
            case "hang up" if alive:
                task = alive[which % len(alive)].task
                assert task is not None
                task.cancel()
            case "cancel" if alive:
                self.lease.cancel(alive[which % len(alive)].hold.ticket.id)
        # Sometimes the next thing happens in the same tick.
        if which % 3:
            await settle()

    async def finish(self) -> list[BaseException | None]:
        """Everyone who holds ends, until nobody is left: without this, max_hold and max_wait would see to it."""
        while any(job.task is not None and not job.task.done() for job in self.jobs):
            await settle()
            for job in self.jobs:
                if job.inside and not job.told.done():
                    job.told.set_result(None)
            await settle()
        return await asyncio.gather(*(job.task for job in self.jobs if job.task), return_exceptions=True)

    def check_empty(self) -> None:
        snapshot = self.lease.snapshot()
        assert self.lease.idle
        assert not snapshot.holders
        assert not snapshot.waiting
        assert not snapshot.rooms

    async def check_usable(self) -> None:
        """Who comes last gets it alone and at once: no count is left over."""
        async with self.lease.hold(id="last", model="last", group="g", mode=Mode.WRITE, limit=1, max_wait=0):
            pass

    def check_stories(self) -> None:
        for ticket, kinds in self.heard.items():
            counted = Counter(kinds)
            assert sum(counted[kind] for kind in ENDS) == 1, kinds
            assert kinds[-1] in ENDS, kinds
            assert counted["granted"] == counted["released"] == (ticket.granted is not None), kinds
            assert kinds[0] == ("rejected" if kinds == ["rejected"] else "queued"), kinds
            assert ticket.released is not None


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["fifo", "phases"]), SCRIPTS)
def test_every_ticket_ends_once_and_nothing_is_left_behind(order: str, script: list[tuple[Action, int, float]]) -> None:
    async def story() -> None:
        world = World(order)
        for action, which, seconds in script:
            if seconds:
                await asyncio.sleep(seconds)
            await world.act(action, which)
        allowed = (type(None), asyncio.CancelledError, Broken, QueueFull, WaitTooLong, HoldExpired, LeaseCancelled)
        for result in await world.finish():
            assert isinstance(result, allowed), result
        world.check_stories()
        world.check_empty()
        await world.check_usable()

    virtual.run(story())


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["fifo", "phases"]), SCRIPTS)
def test_nobody_holds_or_waits_longer_than_allowed(order: str, script: list[tuple[Action, int, float]]) -> None:
    async def story() -> None:
        world = World(order)
        for action, which, seconds in script:
            if seconds:
                await asyncio.sleep(seconds)
            await world.act(action, which)
        await asyncio.gather(*(job.task for job in world.jobs if job.task), return_exceptions=True)
        for job in world.jobs:
            ticket = job.hold.ticket
            if ticket.arrived is None:  # its task was cancelled before it began
                continue
            assert ticket.released is not None
            left = ticket.released if ticket.granted is None else ticket.granted
            assert left - ticket.arrived <= 30.0 + 1e-6
            if ticket.granted is not None:
                assert ticket.released - ticket.granted <= 20.0 + 1e-6
        world.check_stories()
        world.check_empty()
        await world.check_usable()

    virtual.run(story())


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["fifo", "phases"]), SCRIPTS)
def test_closing_lets_nobody_in_and_draining_waits_for_the_last(
    order: str, script: list[tuple[Action, int, float]]
) -> None:
    async def story() -> None:
        world = World(order)
        for action, which, seconds in script:
            if seconds:
                await asyncio.sleep(seconds)
            await world.act(action, which)
        granted = sum(job.hold.ticket.granted is not None for job in world.jobs)
        world.lease.close()
        world.come(0)
        assert await world.lease.drain(60.0), "max_hold ends the last one"
        assert sum(job.hold.ticket.granted is not None for job in world.jobs) == granted
        results = await world.finish()
        assert isinstance(results[-1], LeaseClosed)
        world.check_stories()
        world.check_empty()

    virtual.run(story())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0, 0, 2]), max_size=30), st.randoms(use_true_random=False))
def test_fifo_grants_in_order_of_arrival(kinds: list[int], random: Any) -> None:
    async def story() -> None:
        world = World("fifo")
        world.lease.reconfigure(LeaseSettings(order="fifo", max_hold=1e6, max_wait=1e6, slow_wait=1e9), None)
        for which in kinds:
            world.come(which + 6 * random.randrange(1, 5))
            await asyncio.sleep(1.0)
            inside = [job for job in world.jobs if job.inside and not job.told.done()]
            if inside and random.random() < 0.3:
                random.choice(inside).told.set_result(None)
        await world.finish()
        tickets = [job.hold.ticket for job in world.jobs if job.hold.ticket.limit is None]
        assert [t.number for t in sorted(tickets, key=lambda t: (t.granted, t.number))] == [t.number for t in tickets]

    virtual.run(story())
