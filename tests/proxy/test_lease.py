"""The asyncio shell: every ending, and what the outside sees."""

import asyncio
import functools
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from proxy.errors import HoldExpired, LeaseCancelled, LeaseClosed, NestedLease, QueueFull, WaitTooLong
from proxy.lease import Hold, Lease, LeaseEvent, LeaseSettings
from proxy.line import Mode, Ticket
from tests.proxy import virtual
from tests.proxy.lines import Clock, settle


def make(events: list[str] | None = None, order: Any = "fifo", **settings: Any) -> Lease:
    def listen(event: LeaseEvent) -> None:
        if events is not None:
            events.append(f"{event.ticket.id} {event.kind} {event.reason}".rstrip())

    return Lease("gpu0", LeaseSettings(order=order, **settings), listeners=[listen])


def reader(lease: Lease, id: str = "r", **more: Any) -> Hold:
    return lease.hold(id=id, model="chat", group="chat", mode=Mode.READ, **more)


def writer(lease: Lease, id: str = "w", **more: Any) -> Hold:
    return lease.hold(id=id, model="tts", group="speech", mode=Mode.WRITE, **more)


class Job:
    """A task that holds until its gate opens."""

    def __init__(self, hold: Hold) -> None:
        self.hold = hold
        self.gate = asyncio.Event()
        self.inside = False
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self.hold:
            self.inside = True
            await self.gate.wait()

    async def finish(self) -> None:
        self.gate.set()
        await self.task


def empty(lease: Lease) -> bool:
    snapshot = lease.snapshot()
    return lease.idle and not snapshot.holders and not snapshot.waiting and not snapshot.rooms


async def test_a_reader_enters_beside_a_reader_and_a_writer_waits_for_both() -> None:
    lease = make()
    first, second, third = Job(reader(lease)), Job(reader(lease)), Job(writer(lease))
    await settle()
    assert (first.inside, second.inside, third.inside) == (True, True, False)
    await first.finish()
    await second.finish()
    await settle()
    assert third.inside
    await third.finish()
    assert empty(lease)


async def test_every_ticket_tells_its_story_in_order() -> None:
    events: list[str] = []
    lease = make(events)
    first = Job(writer(lease, "a"))
    await settle()
    second = Job(writer(lease, "b"))
    await settle()
    first.hold.opened()
    first.hold.opened()
    await first.finish()
    await second.finish()
    assert events == [
        "a queued",
        "a granted",
        "b queued",
        "a opened",
        "a released done",
        "b granted",
        "b released done",
    ]


async def test_an_error_in_the_block_is_the_callers_and_frees_the_lease() -> None:
    events: list[str] = []
    lease = make(events)
    with pytest.raises(ZeroDivisionError):
        async with writer(lease):
            raise ZeroDivisionError
    assert events[-1] == "w released error"
    assert empty(lease)


async def test_a_waiting_client_that_goes_leaves_the_line_at_once() -> None:
    events: list[str] = []
    lease = make(events)
    running, gone, behind = Job(reader(lease)), Job(writer(lease, "gone")), Job(reader(lease, "behind"))
    await settle()
    gone.task.cancel()
    await settle()
    assert behind.inside
    assert "gone cancelled client" in events
    await running.finish()
    await behind.finish()
    assert empty(lease)


async def test_a_running_client_that_goes_frees_the_lease() -> None:
    events: list[str] = []
    lease = make(events)
    running, waiting = Job(writer(lease, "a")), Job(writer(lease, "b"))
    await settle()
    running.task.cancel()
    await settle()
    assert waiting.inside
    assert "a released client" in events
    await waiting.finish()
    assert empty(lease)


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_a_grant_in_the_tick_of_the_cancellation_comes_back(cancel_first: bool) -> None:
    lease = make()
    running, unlucky, last = Job(writer(lease)), Job(writer(lease)), Job(writer(lease))
    await settle()
    if cancel_first:
        unlucky.task.cancel()
        running.gate.set()
    else:
        running.gate.set()
        await asyncio.sleep(0)  # the releaser has run, the one it granted has not
        assert unlucky.hold.ticket.granted is not None
        assert not unlucky.inside
        unlucky.task.cancel()
    await settle()
    assert unlucky.task.cancelled()
    assert not unlucky.inside
    assert last.inside
    await last.finish()
    assert empty(lease)


async def test_a_task_cancelled_between_the_grant_and_its_wakeup_gives_the_grant_back() -> None:
    lease = make()
    unlucky: Job | None = None

    async def release_and_cancel() -> None:
        async with writer(lease):
            await settle()
        assert unlucky is not None
        assert unlucky.hold.ticket.granted is not None
        unlucky.task.cancel()

    first = asyncio.create_task(release_and_cancel())
    await asyncio.sleep(0)
    unlucky = Job(writer(lease))
    last = Job(writer(lease))
    await first
    await settle()
    assert unlucky.task.cancelled()
    assert last.inside
    await last.finish()
    assert empty(lease)


async def test_a_task_that_holds_may_not_ask_again() -> None:
    lease, other = make(), make()
    async with reader(lease, "outer"):
        with pytest.raises(NestedLease, match="outer"):
            async with reader(lease):
                pass
        with pytest.raises(NestedLease, match="outer"):
            async with reader(other):
                pass
    async with reader(lease, "after"):
        pass
    assert empty(lease)
    assert empty(other)


async def test_a_child_task_of_a_holder_may_ask() -> None:
    lease = make()

    async def child() -> None:
        async with reader(lease):
            pass

    async with reader(lease):
        await asyncio.create_task(child())
    assert empty(lease)


async def test_a_task_may_ask_again_however_its_last_use_ended() -> None:
    async def prepare(ticket: Ticket) -> None:
        if ticket.id == "broken":
            raise OSError("no")

    full = make(max_waiting=0)
    lease = Lease("gpu0", LeaseSettings(max_wait=0.01), prepare=prepare)
    running = [Job(writer(full)), Job(writer(lease))]
    await settle()
    with pytest.raises(QueueFull):
        await one(writer(full))
    with pytest.raises(WaitTooLong):
        await one(writer(lease))
    with pytest.raises(WaitTooLong):
        await one(writer(lease, max_wait=0))
    for job in running:
        await job.finish()
    with pytest.raises(OSError, match="no"):
        await one(writer(lease, "broken"))
    with pytest.raises(ZeroDivisionError):
        async with writer(lease):
            raise ZeroDivisionError
    asyncio.get_running_loop().call_soon(lease.cancel, "a")
    with pytest.raises(LeaseCancelled):
        async with writer(lease, "a"):
            await asyncio.Event().wait()
    closed = make()
    closed.close()
    with pytest.raises(LeaseClosed):
        await one(writer(closed))
    assert await one(writer(lease)) == 0.0


async def test_what_is_no_task_cannot_hold() -> None:
    lease = make()
    await one(writer(lease))
    told = asyncio.Event()

    def callback() -> None:
        entering = writer(lease).__aenter__()
        with pytest.raises(RuntimeError, match="held by a task"):
            entering.send(None)
        told.set()

    asyncio.get_running_loop().call_soon(callback)
    await told.wait()
    assert empty(lease)


async def test_prepare_may_not_ask_for_the_lease() -> None:
    async def prepare(ticket: Ticket) -> None:
        async with reader(lease):
            pass

    lease = Lease("gpu0", LeaseSettings(), prepare=prepare)
    with pytest.raises(NestedLease):
        async with reader(lease):
            pass
    assert empty(lease)


async def test_a_hold_is_entered_once() -> None:
    lease = make()
    hold = reader(lease)
    async with hold:
        pass
    with pytest.raises(RuntimeError, match="once"):
        async with hold:
            pass


async def test_another_task_that_enters_a_hold_in_use_changes_nothing() -> None:
    events: list[str] = []
    lease = make(events)
    running, waiting = Job(writer(lease, "a")), Job(writer(lease, "b"))
    await settle()
    for hold in (running.hold, waiting.hold):
        with pytest.raises(RuntimeError, match="once"):
            await one(hold)
    assert lease.cancel("a")
    with pytest.raises(LeaseCancelled):
        await running.task
    await settle()
    await waiting.finish()
    assert events[-1] == "b released done"
    assert empty(lease)


async def test_a_full_queue_says_when_to_come_back() -> None:
    events: list[str] = []
    lease = make(events, max_waiting=1)
    running, waiting = Job(writer(lease)), Job(writer(lease))
    await settle()
    with pytest.raises(QueueFull) as caught:
        async with writer(lease, "late"):
            pass
    assert 1 <= int(caught.value.headers["Retry-After"]) <= 60
    assert events[-1] == "late rejected full"
    await running.finish()
    await waiting.finish()
    assert empty(lease)


async def test_a_full_queue_does_not_refuse_those_who_need_not_wait() -> None:
    lease = make(max_waiting=0)
    async with writer(lease):
        await asyncio.create_task(one(lease.hold(id="e", model="e", group="e", mode=Mode.NONE)))


async def one(hold: Hold) -> float:
    async with hold:
        return hold.waited


async def test_retry_after_is_what_the_wait_has_been_lately() -> None:
    clock = Clock()
    lease = Lease("gpu0", LeaseSettings(max_waiting=1), clock=clock)
    running, waiting = Job(writer(lease)), Job(writer(lease))
    await settle()
    clock.now = 20.0
    await running.finish()
    await settle()
    behind = Job(writer(lease))
    clock.now = 27.5
    await waiting.finish()
    await settle()
    again = Job(writer(lease))
    await settle()
    with pytest.raises(QueueFull) as caught:
        await one(writer(lease))
    assert caught.value.headers["Retry-After"] == "20"
    await behind.finish()
    await again.finish()


async def test_waiting_longer_than_allowed_ends_the_wait() -> None:
    events: list[str] = []
    lease = make(events, max_wait=0.01)
    running = Job(reader(lease))
    await settle()
    with pytest.raises(WaitTooLong) as caught:
        await one(writer(lease))
    assert caught.value.headers["x-should-retry"] == "false"
    assert events[-1] == "w timeout"
    await running.finish()
    assert empty(lease)


async def test_one_who_waited_too_long_lets_in_those_it_held_back() -> None:
    lease = make()
    running, short, behind = Job(reader(lease)), Job(writer(lease, max_wait=0.01)), Job(reader(lease))
    with pytest.raises(WaitTooLong):
        await short.task
    await settle()
    assert behind.inside
    await running.finish()
    await behind.finish()


async def test_a_request_can_only_shorten_the_wait() -> None:
    lease = make(max_wait=0.01)
    running = Job(writer(lease))
    await settle()
    with pytest.raises(WaitTooLong, match=r"waited 0\.01 s"):
        await one(writer(lease, max_wait=500.0))
    await running.finish()


async def test_max_wait_zero_is_now_or_never() -> None:
    lease = make()
    assert await one(writer(lease, max_wait=0)) == 0.0
    running = Job(writer(lease))
    await settle()
    waiting = lease.hold(id="x", model="tts", group="g", mode=Mode.WRITE, max_wait=0)
    with pytest.raises(WaitTooLong):
        await one(waiting)
    await running.finish()
    assert empty(lease)


async def test_a_wait_that_usually_takes_longer_than_allowed_is_refused_at_once() -> None:
    clock = Clock()
    lease = Lease("gpu0", LeaseSettings(), clock=clock)
    teacher = Job(writer(lease))
    await settle()
    teacher.hold.opened()
    clock.now = 10.0
    await teacher.finish()
    running = Job(writer(lease))
    await settle()
    clock.now = 12.0
    with pytest.raises(WaitTooLong, match=r"at least 8\.0 s"):
        await one(writer(lease, max_wait=7.0))
    patient = Job(writer(lease, max_wait=9.0))
    await settle()
    assert len(lease.snapshot().waiting) == 1
    await running.finish()
    await patient.finish()


async def test_holding_too_long_ends_the_block_with_an_error() -> None:
    events: list[str] = []
    lease = make(events, max_hold=0.01)
    with pytest.raises(HoldExpired):
        async with writer(lease):
            await asyncio.Event().wait()
    assert events[-1] == "w released max_hold"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert empty(lease)


def in_virtual_time(story: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test whose sleeps take no time."""

    @functools.wraps(story)
    def run() -> None:
        virtual.run(story())

    return run


def on_the_loops_clock(**settings: Any) -> Lease:
    return Lease("gpu0", LeaseSettings(**settings), clock=asyncio.get_running_loop().time)


@in_virtual_time
async def test_each_hold_has_its_own_time() -> None:
    lease = on_the_loops_clock(max_hold=10.0)
    ends = {}
    jobs = []
    for start in (0.0, 4.0, 8.0):
        jobs.append(Job(reader(lease, str(start))))
        jobs[-1].task.add_done_callback(lambda task, start=start: ends.update({start: lease.now()}))
        await asyncio.sleep(4.0)
    results = await asyncio.gather(*(job.task for job in jobs), return_exceptions=True)
    assert [type(result) for result in results] == [HoldExpired] * 3
    assert ends == {0.0: 10.0, 4.0: 14.0, 8.0: 18.0}
    assert empty(lease)


@in_virtual_time
async def test_another_max_hold_counts_for_those_who_hold() -> None:
    lease = on_the_loops_clock(max_hold=10.0)
    job = Job(reader(lease))
    await asyncio.sleep(5.0)
    lease.reconfigure(LeaseSettings(max_hold=600.0), None)
    await asyncio.sleep(100.0)
    assert job.inside
    lease.reconfigure(LeaseSettings(max_hold=120.0), None)
    with pytest.raises(HoldExpired):
        await job.task
    assert lease.now() == 120.0


async def test_a_client_that_hangs_up_in_the_tick_in_which_it_is_cancelled_is_gone() -> None:
    lease = make()
    running, waiting, last = Job(writer(lease, "a")), Job(writer(lease, "b")), Job(writer(lease, "c"))
    await settle()
    waiting.task.cancel()
    assert lease.cancel("b")
    await settle()
    assert waiting.task.cancelled()
    await running.finish()
    await last.finish()
    assert empty(lease)


async def test_the_lease_stays_taken_while_an_expired_holder_cleans_up() -> None:
    lease = make(max_hold=0.01)
    cleaned = asyncio.Event()

    async def stubborn() -> None:
        async with writer(lease, "stubborn"):
            try:
                await asyncio.Event().wait()
            finally:
                await cleaned.wait()

    task = asyncio.create_task(stubborn())
    await settle()
    waiting = Job(writer(lease, "waiting"))
    await asyncio.sleep(0.02)
    assert not waiting.inside
    cleaned.set()
    with pytest.raises(HoldExpired):
        await task
    await settle()
    assert waiting.inside
    await waiting.finish()


async def test_a_cancellation_from_outside_wins_over_our_own() -> None:
    lease = make()
    job = Job(writer(lease, "a"))
    await settle()
    assert lease.cancel("a")
    job.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job.task
    assert empty(lease)


async def test_a_cancellation_from_outside_that_came_first_wins_as_well() -> None:
    events: list[str] = []
    lease = make(events)
    job = Job(writer(lease, "a"))
    await settle()
    job.task.cancel()
    lease.cancel("a")
    with pytest.raises(asyncio.CancelledError):
        await job.task
    assert events[-1] == "a released client"


async def test_an_older_cancellation_that_was_survived_does_not_count() -> None:
    lease = make()

    async def survivor() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        async with writer(lease, "a"):
            await asyncio.Event().wait()

    task = asyncio.create_task(survivor())
    await settle()
    task.cancel()
    await settle()
    lease.cancel("a")
    with pytest.raises(LeaseCancelled):
        await task


async def test_a_block_that_swallows_our_cancellation_leaves_none_behind() -> None:
    lease = make()

    async def swallow() -> int:
        async with writer(lease, "a"):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    task = asyncio.create_task(swallow())
    await settle()
    lease.cancel("a")
    assert await task == 0


async def test_an_administrator_cancels_who_waits_and_who_runs() -> None:
    events: list[str] = []
    lease = make(events)
    running, waiting, last = Job(writer(lease, "a")), Job(writer(lease, "b")), Job(writer(lease, "c"))
    await settle()
    assert lease.cancel("b")
    with pytest.raises(LeaseCancelled):
        await waiting.task
    assert lease.cancel("a")
    with pytest.raises(LeaseCancelled):
        await running.task
    await settle()
    assert last.inside
    assert not lease.cancel("b")
    assert {"b cancelled admin", "a released admin"} <= set(events)
    await last.finish()
    assert empty(lease)


async def test_an_administrator_cancels_one_that_was_granted_in_this_tick() -> None:
    lease = make()
    unlucky: Job | None = None

    async def release_and_cancel() -> None:
        async with writer(lease):
            await settle()
        assert lease.cancel("unlucky")

    first = asyncio.create_task(release_and_cancel())
    await asyncio.sleep(0)
    unlucky = Job(writer(lease, "unlucky"))
    await first
    with pytest.raises(LeaseCancelled):
        await unlucky.task
    assert not unlucky.inside
    assert empty(lease)


async def test_whoever_hears_of_a_grant_may_cancel_it() -> None:
    def listen(event: LeaseEvent) -> None:
        if event.kind == "granted":
            assert lease.cancel(event.ticket.id)

    lease = Lease("gpu0", LeaseSettings(), listeners=[listen])
    job = Job(writer(lease))
    with pytest.raises(LeaseCancelled):
        await job.task
    assert empty(lease)


async def test_closing_turns_away_who_waits_and_who_comes_but_nobody_who_holds() -> None:
    events: list[str] = []
    lease = make(events)
    running = Job(reader(lease, "a"))
    await settle()
    waiting = [Job(writer(lease, "b")), Job(reader(lease, "c")), Job(writer(lease, "d"))]
    await settle()
    lease.close()
    for job in waiting:
        with pytest.raises(LeaseClosed):
            await job.task
        assert not job.inside
    with pytest.raises(LeaseClosed):
        await one(reader(lease, "e"))
    assert running.inside
    assert not await lease.drain(0)
    running.gate.set()
    assert await lease.drain(5)
    assert empty(lease)
    assert {"b cancelled shutdown", "c cancelled shutdown", "e rejected shutdown", "a released done"} <= set(events)


async def test_prepare_comes_after_the_grant_and_before_the_block() -> None:
    order: list[str] = []

    async def prepare(ticket: Ticket) -> None:
        order.append(f"prepare {ticket.granted is not None}")

    lease = Lease("gpu0", LeaseSettings(), prepare=prepare)
    async with writer(lease):
        order.append("block")
    assert order == ["prepare True", "block"]


async def test_a_failed_prepare_is_an_error_of_that_request_alone() -> None:
    async def prepare(ticket: Ticket) -> None:
        await asyncio.sleep(0)
        if ticket.id == "a":
            raise OSError("no")

    lease = Lease("gpu0", LeaseSettings(), prepare=prepare)
    first, second = Job(writer(lease, "a")), Job(writer(lease, "b"))
    with pytest.raises(OSError, match="no"):
        await first.task
    await settle()
    assert second.inside
    await second.finish()
    assert empty(lease)


async def test_holding_too_long_counts_from_the_grant_so_prepare_too() -> None:
    async def prepare(ticket: Ticket) -> None:
        await asyncio.Event().wait()

    lease = Lease("gpu0", LeaseSettings(max_hold=0.01), prepare=prepare)
    with pytest.raises(HoldExpired):
        await one(writer(lease))
    assert empty(lease)


async def test_a_slow_wait_is_logged_once_with_those_who_held(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "proxy.lease")
    clock = Clock()
    lease = Lease("gpu0", LeaseSettings(slow_wait=2.0), clock=clock)
    chats = [Job(reader(lease)), Job(reader(lease))]
    await settle()
    speech, quick = Job(writer(lease, "w1")), Job(writer(lease, "w2"))
    await settle()
    clock.now = 6.0
    for job in chats:
        await job.finish()
    await settle()
    clock.now = 7.5
    await speech.finish()
    await quick.finish()
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "slow wait lease=gpu0 id=w1 model=tts mode=write outcome=granted waited=6.0 held_by=chat x2",
        "slow wait lease=gpu0 id=w2 model=tts mode=write outcome=granted waited=7.5 held_by=chat x2, tts x1",
    ]


async def test_a_slow_wait_that_fails_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "proxy.lease")
    clock = Clock()
    lease = Lease("gpu0", LeaseSettings(), clock=clock)
    running, gone = Job(reader(lease)), Job(writer(lease))
    await settle()
    clock.now = 3.0
    gone.task.cancel()
    await settle()
    assert "outcome=cancelled waited=3.0 held_by=chat x1" in caplog.text
    await running.finish()


async def test_a_listener_that_fails_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: LeaseEvent) -> None:
        raise ZeroDivisionError

    lease = Lease("gpu0", LeaseSettings(), listeners=[broken])
    async with writer(lease):
        pass
    assert "a listener of lease gpu0 failed on granted" in caplog.text
    assert empty(lease)


async def test_a_snapshot_shows_who_holds_and_who_waits_and_where() -> None:
    clock = Clock()
    lease = Lease("gpu0", LeaseSettings(), clock=clock)
    clock.now = 1.0
    running = Job(reader(lease, "a"))
    await settle()
    running.hold.opened()
    clock.now = 2.0
    waiting = [Job(writer(lease, "b")), Job(reader(lease, "c"))]
    await settle()
    clock.now = 5.0
    snapshot = lease.snapshot()
    (holder,) = snapshot.holders
    assert (holder.id, holder.model, holder.mode, holder.held, holder.opened) == ("a", "chat", Mode.READ, 4.0, True)
    assert [(w.id, w.position, w.waited, w.group) for w in snapshot.waiting] == [
        ("b", 1, 3.0, "speech"),
        ("c", 2, 3.0, "chat"),
    ]
    assert snapshot.room == ("chat",)
    assert [(room.models, room.since, room.open_for) for room in snapshot.rooms] == [(("chat",), 4.0, 4.0)]
    assert repr(lease) == "<Lease gpu0: 1 holding, 2 waiting>"
    for job in [running, *waiting]:
        await job.finish()


async def test_those_who_wait_keep_their_places_under_new_settings() -> None:
    lease = make(order="fifo")
    running = Job(writer(lease, "a"))
    await settle()
    waiting = [Job(writer(lease, "b")), Job(writer(lease, "c"))]
    await settle()
    lease.reconfigure(LeaseSettings(order="phases", max_waiting=0), None)
    assert [w.id for w in lease.snapshot().waiting] == ["b", "c"]
    await running.finish()
    await settle()
    assert [job.inside for job in waiting] == [True, False]
    for job in waiting:
        await job.finish()


async def test_a_thousand_tasks_with_random_fates_leave_nothing_behind() -> None:

    fate = random.Random(5)
    lease = make(max_wait=0.05, max_hold=0.05)
    inside: list[Mode] = []

    async def one_of_many(number: int) -> None:
        mode = fate.choice([Mode.READ, Mode.READ, Mode.WRITE, Mode.NONE])
        async with lease.hold(
            id=str(number), model=fate.choice("ab"), group="g", mode=mode, limit=fate.choice([None, 2])
        ):
            if mode is not Mode.NONE:
                assert mode is Mode.READ or not inside
                assert Mode.WRITE not in inside
                inside.append(mode)
            try:
                for _ in range(fate.randrange(5)):
                    await asyncio.sleep(0)
                if fate.random() < 0.02:
                    await asyncio.Event().wait()
            finally:
                if mode is not Mode.NONE:
                    inside.remove(mode)

    tasks = []
    for number in range(1000):
        tasks.append(asyncio.create_task(one_of_many(number)))
        if fate.random() < 0.3:
            await asyncio.sleep(0)
        if fate.random() < 0.2:
            fate.choice(tasks).cancel()
        if fate.random() < 0.05:
            lease.cancel(str(fate.randrange(number + 1)))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    allowed = (type(None), asyncio.CancelledError, WaitTooLong, HoldExpired, LeaseCancelled)
    assert all(isinstance(result, allowed) for result in results)
    assert empty(lease)
