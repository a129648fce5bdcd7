"""The lease: the asyncio shell around a `Line`, which decides. The shell acts: it wakes, times, logs and tells.

A hold is a context manager and nothing else. Its block spans the last byte of an answer, and leaving it is one path for
every ending: served, failed, timed out, cancelled while waiting, cancelled in the tick of the grant. Ownership moves in
the releaser: a ticket holds from the moment the line grants it, and waking its task is only the news.

A hold may be taken from outside (`max_hold`, an administrator): its task is cancelled, and at the border of the block
that cancellation becomes HoldExpired or LeaseCancelled, unless somebody else has cancelled the task as well.
"""

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, NamedTuple, Self

from proxy.errors import HoldExpired, LeaseCancelled, LeaseClosed, LeaseError, NestedLease, QueueFull, WaitTooLong
from proxy.line import Line, Mode, Policy, Residency, Ticket
from proxy.snapshot import Holder, LeaseSnapshot, RoomView, Waiter
from proxy.usual import Usual

logger = logging.getLogger(__name__)

Kind = Literal[
    "queued", "granted", "opened", "released", "rejected", "timeout", "cancelled", "closed", "swap", "overtake"
]


@dataclass(frozen=True, slots=True)
class LeaseSettings(Policy):
    """The limits of one lease. Times in seconds."""

    max_wait: float = 600.0
    max_waiting: int = 1000
    max_hold: float = 1800.0
    slow_wait: float = 2.0


class LeaseEvent(NamedTuple):
    """One thing that happened. Every ticket ends in one of released, rejected, timeout, cancelled.

    `reason`: of rejected full, shutdown; of cancelled (before a grant) client, admin, shutdown; of released done, error,
    client, max_hold, admin. The ticket is the live object: for reading only.
    """

    kind: Kind
    lease: str
    ticket: Ticket
    at: float
    reason: str = ""


# What each task waits for or holds, whatever the lease. Not a context variable: children of the task may ask.
_holds: dict["asyncio.Task[object]", "Hold"] = {}


class Hold:
    """One request's use of the lease: `async with lease.hold(...) as hold`. Can be entered once."""

    __slots__ = ("_cancelling", "_lease", "_max_wait", "_revoked", "_task", "_timer", "_wakeup", "ticket")

    _cancelling: int  # how often its task had been cancelled when it came
    _task: "asyncio.Task[object]"
    _timer: asyncio.TimerHandle | None

    def __init__(self, lease: "Lease", ticket: Ticket, max_wait: float | None) -> None:
        self.ticket = ticket
        self._lease = lease
        self._max_wait = max_wait
        self._wakeup: asyncio.Future[None] | None = None  # of one that had to wait
        self._revoked: LeaseError | None = None

    @property
    def waited(self) -> float:
        """Seconds in line; those so far while it waits."""
        ticket = self.ticket
        if ticket.arrived is None:
            return 0.0
        return (self._lease.now() if ticket.granted is None else ticket.granted) - ticket.arrived

    def opened(self) -> None:
        """The first byte of the answer is here. Only the first call counts."""
        if self.ticket.opened is None and self.ticket.released is None:
            self._lease._opened(self.ticket)

    async def __aenter__(self) -> Self:
        lease = self._lease
        task = None if lease._loop is None else asyncio.current_task(lease._loop)
        if task is None:
            task = lease._find_task()
        if task in _holds:
            outer = _holds[task]
            raise NestedLease(f"request {outer.ticket.id} holds the lease {outer._lease.name} and asked for another")
        if self.ticket.arrived is not None:
            raise RuntimeError("a hold can be entered once")
        self._task = task
        self._cancelling = task.cancelling()
        lease._join(self)
        _holds[task] = self
        if self._wakeup is not None or lease._prepare is not None:
            try:
                if self._wakeup is not None:
                    await self._wakeup
                if lease._prepare is not None:
                    await lease._prepare(self.ticket)
            except BaseException as error:
                await self.__aexit__(type(error), error, None)
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The only way out, also of a wait."""
        task = self._task
        del _holds[task]
        # As asyncio.timeout does: our own cancellation is taken back, and if any other is left, that one counts.
        if (
            self._revoked is not None
            and task.uncancel() <= self._cancelling
            and isinstance(error, asyncio.CancelledError)
        ):
            self._lease._leave(self, self._revoked)
            raise self._revoked from error
        self._lease._leave(self, error)

    def _revoke(self, error: LeaseError) -> None:
        """Takes a granted hold away: its task is cancelled and sees `error`."""
        if self._revoked is None:
            self._revoked = error
            self._task.cancel()


class Lease:
    """A fair lease on one GPU, for the tasks of one event loop.

    `clock` gives seconds and does not go back. `listeners` are called in the middle of things: they must be quick, and
    what they raise is logged. `prepare` is awaited after a grant and before the block runs; when it fails, the block
    does not run and the error is the caller's.
    """

    def __init__(
        self,
        name: str,
        settings: LeaseSettings,
        *,
        residency: Residency | None = None,
        clock: Callable[[], float] = time.monotonic,
        listeners: Sequence[Callable[[LeaseEvent], None]] = (),
        prepare: Callable[[Ticket], Awaitable[None]] | None = None,
    ) -> None:
        self.name = name
        self.now = clock
        self._settings = settings
        self._residency = residency
        self._listeners = tuple(listeners)
        self._prepare = prepare
        self._usual = Usual()
        self._line = Line(settings, residency, self._usual)
        self._waiting: dict[Ticket, Hold] = {}
        self._running: dict[Ticket, Hold] = {}  # in the order of their grants
        self._held_meanwhile: deque[Ticket] = deque(maxlen=256)  # the last to be released while somebody waited
        self._sweeper: asyncio.TimerHandle | None = None
        self._idle: asyncio.Event | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None  # of the last to come; saves looking for it each time

    def __repr__(self) -> str:
        return f"<Lease {self.name}: {len(self._running)} holding, {len(self._waiting)} waiting>"

    def hold(
        self,
        *,
        id: str,
        model: str,
        group: str,
        mode: Mode,
        limit: int | None = None,
        max_wait: float | None = None,
    ) -> Hold:
        """The right to use the GPU, as an async context manager that gives the Hold.

        `limit`: at most so many of `model` hold at once. `max_wait`: seconds; can only shorten the lease's own, 0 means
        now or never, and a wait that is usually longer is refused at once. Entering raises QueueFull, WaitTooLong,
        LeaseClosed, LeaseCancelled, NestedLease, and what `prepare` raises; the block can also end in HoldExpired or
        LeaseCancelled.
        """
        return Hold(self, Ticket(id, model, group, mode, limit), max_wait)

    @property
    def idle(self) -> bool:
        """Nobody holds and nobody waits."""
        return not self._running and not self._waiting

    @property
    def held(self) -> frozenset[str]:
        """The models of those who hold, but for mode `none`."""
        return frozenset(ticket.model for ticket in self._running if ticket.mode is not Mode.NONE)

    def cancel(self, ticket_id: str) -> bool:
        """Takes a waiting or a running request out. False where there is none of that id."""
        error = LeaseCancelled()
        found = [hold for hold in (*self._waiting.values(), *self._running.values()) if hold.ticket.id == ticket_id]
        for hold in found:
            if hold.ticket in self._waiting:
                self._take_out(hold, "cancelled", "admin", error)
            else:  # also one of the same id that was granted because another has just left
                hold._revoke(error)
        return bool(found)

    def reconfigure(self, settings: LeaseSettings, residency: Residency | None) -> None:
        """Other settings from now on. Everyone keeps their place; the max_wait of those who wait stays as it was."""
        self._settings = settings
        self._residency = residency
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        self._wake(self._line.reconfigure(settings, residency, self.now()))
        self._arm_sweeper()

    def correct_resident(self, models: Iterable[str]) -> None:
        """What is resident in truth, from one who has looked while nobody held."""
        self._line.resident = frozenset(models)

    def close(self) -> None:
        """No more grants: those who wait get LeaseClosed, and so does everyone who comes. Holders are left alone."""
        self._closed = True
        # The youngest first: nobody waits for one who came later, so nobody is granted on the way.
        while self._waiting:
            self._take_out(next(reversed(self._waiting.values())), "cancelled", "shutdown", LeaseClosed())

    async def drain(self, timeout: float) -> bool:
        """Waits until nobody holds, at most `timeout` seconds; says whether that is so."""
        try:
            async with asyncio.timeout(timeout):
                while self._running:
                    if self._idle is None:
                        self._idle = asyncio.Event()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def snapshot(self) -> LeaseSnapshot:
        """The lease as it is now; costs in the number of tickets in it."""
        now = self.now()
        return LeaseSnapshot(
            name=self.name,
            order=self._settings.order,
            closed=self._closed,
            holders=tuple(
                Holder(
                    t.id, t.model, t.group, t.mode, hold.waited, _since(t.granted, now), t.opened is not None, t.number
                )
                for t, hold in self._running.items()
            ),
            waiting=tuple(
                Waiter(t.id, t.model, t.group, t.mode, hold.waited, position, t.number)
                for position, (t, hold) in enumerate(self._waiting.items(), 1)
            ),
            room=tuple(sorted(self.held)),
            rooms=tuple(
                RoomView(r.mode, tuple(sorted(r.models)), now - r.since, None if r.opened is None else now - r.opened)
                for r in self._line.rooms
            ),
            resident=tuple(sorted(self._line.resident)),
            rules=() if self._residency is None else self._residency.words(),
        )

    # What a hold does

    def _find_task(self) -> "asyncio.Task[object]":
        """The current task, of whatever loop runs now."""
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task(self._loop)
        if task is None:
            raise RuntimeError("a lease is held by a task")
        return task

    def _join(self, hold: Hold) -> None:
        """Raises before it is in line: QueueFull, LeaseClosed, WaitTooLong. Afterwards _leave is owed."""
        ticket, line, now = hold.ticket, self._line, self.now()
        if self._closed:
            ticket.arrived = ticket.released = now
            self._tell("rejected", ticket, now, "shutdown")
            raise LeaseClosed
        if line.join(ticket, now):
            self._running[ticket] = hold
            if self._sweeper is None:
                self._arm_sweeper()
            if self._listeners:
                self._tell("queued", ticket, now)
                self._tell_granted(ticket, now)
            return
        if len(self._waiting) >= self._settings.max_waiting:
            line.leave(ticket, now)
            self._tell("rejected", ticket, now, "full")
            raise QueueFull(
                f"{len(self._waiting)} requests wait already; the queue is full", retry_after=self._retry_after(now)
            )
        self._tell("queued", ticket, now)
        loop = asyncio.get_running_loop()
        self._waiting[ticket] = hold
        hold._wakeup = loop.create_future()
        hold._timer = None
        longest = self._settings.max_wait
        if hold._max_wait is not None:
            longest = min(longest, hold._max_wait)
            usual = self._usual_wait(ticket, now)
            if longest <= 0 or usual > longest:
                self._take_out(hold, "timeout")
                raise WaitTooLong(f"the wait would be over the {longest:g} s allowed (usually at least {usual:.1f} s)")
        hold._timer = loop.call_later(longest, self._give_up, hold, longest)

    def _give_up(self, hold: Hold, longest: float) -> None:
        self._take_out(hold, "timeout", "", WaitTooLong(f"waited {longest:g} s for the lease, no longer allowed"))

    def _opened(self, ticket: Ticket) -> None:
        now = self.now()
        self._line.opened(ticket, now)
        self._tell("opened", ticket, now)

    def _leave(self, hold: Hold, error: BaseException | None) -> None:
        ticket = hold.ticket
        if ticket.released is not None:
            return  # taken out while it waited, and the news had not reached its task
        if ticket.granted is None:
            self._take_out(hold, "cancelled", "client")
            return
        now = self.now()
        del self._running[ticket]
        granted = self._line.leave(ticket, now)
        self._usual.learn(ticket)
        if self._waiting:
            self._held_meanwhile.append(ticket)
        if self._listeners:
            self._tell("released", ticket, now, _reason(error))
        if granted:
            self._wake(granted)
        if self._idle is not None and not self._running:
            self._idle.set()
            self._idle = None

    def _take_out(self, hold: Hold, kind: Kind, reason: str = "", error: LeaseError | None = None) -> None:
        """Ends a wait; `error` is the news for its task, unless that task is ending anyway."""
        ticket, now = hold.ticket, self.now()
        del self._waiting[ticket]
        granted = self._line.leave(ticket, now)
        if hold._timer is not None:
            hold._timer.cancel()
        if error is not None and hold._wakeup is not None and not hold._wakeup.done():
            hold._wakeup.set_exception(error)
        self._log_slow(ticket, now, kind)
        self._tell(kind, ticket, now, reason)
        self._wake(granted)

    def _wake(self, granted: Sequence[Ticket]) -> None:
        now = self.now()
        for ticket in granted:
            hold = self._waiting.pop(ticket)
            self._running[ticket] = hold
            if hold._timer is not None:
                hold._timer.cancel()
            # Done already when its task was cancelled in this tick: it holds for a moment, and leaves as a holder.
            if hold._wakeup is not None and not hold._wakeup.done():
                hold._wakeup.set_result(None)
            if self._sweeper is None:
                self._arm_sweeper()
            self._log_slow(ticket, now, "granted")
            self._tell_granted(ticket, now)

    def _tell_granted(self, ticket: Ticket, now: float) -> None:
        self._tell("granted", ticket, now)
        if ticket.swaps:
            self._tell("swap", ticket, now)
        if ticket.overtakes:
            self._tell("overtake", ticket, now)

    # max_hold: one timer for all, for the hold that is due next; it is left alone while holds come and go

    def _arm_sweeper(self) -> None:
        for ticket, hold in self._running.items():
            if hold._revoked is None and ticket.granted is not None:
                due = ticket.granted + self._settings.max_hold
                self._sweeper = asyncio.get_running_loop().call_later(max(0.0, due - self.now()), self._sweep)
                return

    def _sweep(self) -> None:
        self._sweeper = None
        limit = self._settings.max_hold
        for ticket, hold in self._running.items():
            if ticket.granted is not None and self.now() - ticket.granted < limit:
                break
            logger.warning(
                "held too long lease=%s id=%s model=%s max_hold=%g", self.name, ticket.id, ticket.model, limit
            )
            hold._revoke(HoldExpired(f"the request held the GPU for longer than {limit:g} s"))
        self._arm_sweeper()

    # Estimates, news and the log

    def _usual_wait(self, ticket: Ticket, now: float) -> float:
        """Seconds that the wait usually takes at least, by what holds and what waits in the same lane."""
        wait = 0.0
        if self._line.conflicts(ticket):
            wait = min(
                (
                    max(0.0, self._usual.length(t.model) - _since(t.granted, now))
                    for t in self._running
                    if t.mode is not Mode.NONE
                ),
                default=0.0,
            )
        ahead, together = self._line.ahead(ticket), 1 if ticket.mode is Mode.WRITE else ticket.limit
        if together is not None:
            wait += ahead // together * self._usual.length(ticket.model)
        return wait

    def _retry_after(self, now: float) -> int:
        """When those who wait now are usually through: seconds, 1 to 60."""
        oldest = next(iter(self._waiting), None)
        age = 0.0 if oldest is None else _since(oldest.arrived, now)
        return max(1, min(60, math.ceil(max(self._usual.wait(), age))))

    def _tell(self, kind: Kind, ticket: Ticket, at: float, reason: str = "") -> None:
        if not self._listeners:
            return
        event = LeaseEvent(kind, self.name, ticket, at, reason)
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener of lease %s failed on %s", self.name, kind)

    def _log_slow(self, ticket: Ticket, now: float, outcome: str) -> None:
        waited = _since(ticket.arrived, now)
        if waited < self._settings.slow_wait:
            return
        held = Counter(
            other.model or "(no model)"
            for other in (*self._held_meanwhile, *self._running)
            if other is not ticket and other.mode is not Mode.NONE and _since(other.released, now) < waited
        )
        logger.info(
            "slow wait lease=%s id=%s model=%s mode=%s outcome=%s waited=%.1f held_by=%s",
            self.name,
            ticket.id,
            ticket.model,
            ticket.mode.value,
            outcome,
            waited,
            ", ".join(f"{model} x{count}" for model, count in held.most_common()) or "nobody",
        )


def _since(time: float | None, now: float) -> float:
    return 0.0 if time is None else now - time


def _reason(error: BaseException | None) -> str:
    match error:
        case None:
            return "done"
        case HoldExpired():
            return "max_hold"
        case LeaseCancelled():
            return "admin"
        case asyncio.CancelledError():
            return "client"
        case _:
            return "error"
