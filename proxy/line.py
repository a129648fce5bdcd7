"""The rules of the lease: who may hold it now. Plain data: no event loop, no clock, no log.

Three questions decide, and every grant asks them in this order.

Fits.      A writer holds alone, readers hold together, and only models that can be resident together hold together.
           Mode `none` fits always. `limit` bounds how many tickets of one model hold at once, whatever their mode.
Hinders.   A ticket hinders a waiting one when that one could not enter beside it: one of the two is a writer, or some
           set of models that cannot be resident together holds both of them and otherwise only holders.
Older.     Tickets are numbered as they come.

Order `fifo`: a ticket enters when it fits and hinders nobody older who waits. So no ticket is granted before an older one
that it hinders. It may pass those it does not hinder: an embedding passes a vision request that waits for chats to end,
and a chat that only its own model's `limit` holds back keeps no reader of another model waiting. A waiting writer lets
no younger reader pass, so readers cannot starve it; older readers go before it, those that wait for their `limit`, too.

Order `phases`: as fifo, and besides a ticket may pass older ones that it hinders by the rules of a room. A room
(`Room`) is one phase of the models in it. It
  1. opens with a ticket that hindered nobody older: the longest waiter of all who want that part of the card. While it
     opens, until the first byte of an answer, whoever comes for it may enter. Somebody leaving it ends that, too: loads
     that fail one after the other must not keep a room open;
  2. has opened then. Everyone who waited for it at that moment is served in this phase;
  3. lets newcomers in for `slice` seconds more (auto: as long as it took to open, at most `max_slice`), and while the
     oldest whom they hinder can still start within `patience` seconds;
  4. then lets nobody pass. It drains, and the next room opens.
A model enters by the rules of the room that it is in. One that is in none may join any room whose models it goes with.
A ticket that hinders nobody older needs no room's leave, and opens one if its model is in none: so two GPUs under one
lease take turns independently, and what goes with everything never waits.

The bound: while a ticket waits, only older ones open rooms that keep it out, each kind of them once; and each such room
lasts as long as its opening, its slice, and the work that waited when it had opened. Time only ever closes a room, so
nothing has to happen when it passes: no timers.

Tickets of one mode and model differ by age only. They wait in one `Lane`, and only the heads of lanes are looked at: an
event costs in the number of models that wait, never in the number of waiters.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol


class Mode(StrEnum):
    """How a ticket holds the lease."""

    READ = "read"  # shared
    WRITE = "write"  # exclusive
    NONE = "none"  # beside everybody


# A member of an Enum is slow to get at, and the rules ask for nothing so often.
READ, WRITE, NONE = Mode.READ, Mode.WRITE, Mode.NONE


class Residency(Protocol):
    """Which models can be resident together. Every subset of what can be resident can be resident, too."""

    def id(self, model: str) -> str:
        """The model that a name stands for."""

    def admits(self, held: frozenset[str], model: str) -> bool:
        """Can `model` be loaded, or stay, without stopping one of `held`?"""

    def hinders(self, held: frozenset[str], waiter: str, newcomer: str) -> bool:
        """Is there a part of `held` beside which `waiter` is admitted, but not when `newcomer` is there as well?"""

    def after(self, resident: frozenset[str], held: frozenset[str], model: str) -> frozenset[str]:
        """What is resident once `model` has been loaded where `resident` were, of which `held` must stay."""

    def words(self) -> tuple[str, ...]:
        """The rules for people: one line for each model that excludes others."""


class Usual(Protocol):
    """What things usually take, in seconds."""

    def length(self, model: str) -> float:
        """One request of a model that is resident."""

    def opening(self, model: str) -> float:
        """From the grant that needs a model loaded to the first byte of an answer."""


@dataclass(frozen=True, slots=True)
class Policy:
    """In which order tickets enter. Times in seconds."""

    order: Literal["phases", "fifo"] = "phases"
    slice: Literal["auto"] | float = "auto"
    max_slice: float = 30.0  # bounds `auto` only
    patience: float = 0.0


@dataclass(slots=True, eq=False)
class Room:
    """One phase: tickets of one mode whose models can be resident together."""

    mode: Mode
    models: set[str]
    since: float  # the first grant
    opened: float | None = None  # the first byte of an answer; None while it opens
    batch: int = 0  # the youngest ticket that had come when it had opened
    holders: int = 0


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's place. Times are the lease's clock, in seconds; None: not yet."""

    id: str
    model: str
    group: str
    mode: Mode
    limit: int | None = None  # at most so many tickets of this model hold at once
    arrived: float | None = None
    granted: float | None = None
    opened: float | None = None
    released: float | None = None  # or when it left without a grant
    swaps: bool = False  # its grant changed what must be resident
    overtakes: bool = False  # it was granted before an older ticket that it hinders
    number: int = 0  # in order of arrival, from 1
    room: Room | None = field(default=None, repr=False)


class Lane:
    """The waiting tickets of one mode and model, oldest first; never empty while it is in the line."""

    __slots__ = ("head", "mode", "model", "tickets")

    def __init__(self, first: Ticket) -> None:
        self.mode = first.mode
        self.model = first.model
        self.head = first
        # Not a dict: looking for the first key of a dict walks over all that were deleted before it.
        self.tickets: OrderedDict[Ticket, None] = OrderedDict({first: None})

    def remove(self, ticket: Ticket) -> bool:
        """Takes a ticket out; says whether somebody is left."""
        del self.tickets[ticket]
        if not self.tickets:
            return False
        if ticket is self.head:
            self.head = next(iter(self.tickets))
        return True


@dataclass(frozen=True, slots=True)
class _Entry:
    """Whom to grant next: the head of `lane`, into `room` (None: its own, or a new one)."""

    lane: Lane
    room: Room | None
    overtakes: bool


class Line:
    """Who holds the lease and who waits for it.

    `join`, `leave` and `reconfigure` return the tickets that they granted, which hold the lease from then on.
    `now` is any clock that does not go back, in seconds.
    """

    def __init__(self, policy: Policy, residency: Residency | None = None, usual: Usual | None = None) -> None:
        self._policy = policy
        self._phases = policy.order == "phases"
        self._residency = residency
        self._usual = usual
        self._count = 0
        self._lanes: dict[tuple[Mode, str], Lane] = {}
        self._models: dict[str, int] = {}  # how many of each model hold, but for mode none
        self._beside: dict[str, int] = {}  # of mode none
        self._writing = False  # the one who holds is a writer
        self._rooms: list[Room] = []
        self.resident: frozenset[str] = frozenset()
        """The models that the grants so far have left resident; whoever knows better may correct it."""

    def __repr__(self) -> str:
        holding, writing = sum(self._models.values()), int(self._writing)
        return f"<Line {holding - writing} read, {writing} write, {sum(1 for _ in self.waiting())} waiting>"

    @property
    def rooms(self) -> Sequence[Room]:
        """The rooms that somebody is in. Order `phases` only."""
        return self._rooms

    def waiting(self) -> Iterator[Ticket]:
        """Who waits, lane by lane."""
        for lane in self._lanes.values():
            yield from lane.tickets

    def ahead(self, ticket: Ticket) -> int:
        """How many of the same mode and model wait, itself not counted."""
        lane = self._lanes.get((ticket.mode, ticket.model))
        return 0 if lane is None else len(lane.tickets) - (ticket in lane.tickets)

    def conflicts(self, ticket: Ticket) -> bool:
        """Does somebody hold the lease beside whom this ticket does not fit?"""
        return not self._fits(ticket.mode, ticket.model)

    def join(self, ticket: Ticket, now: float) -> Sequence[Ticket]:
        """Stands in line; grants nobody but this ticket."""
        self._count = ticket.number = self._count + 1
        ticket.arrived = now
        mode, model = ticket.mode, ticket.model
        if not self._lanes and self._fits(mode, model) and (ticket.limit is None or self._has_capacity(ticket)):
            self._grant(ticket, None, now)
            return (ticket,)
        lane = self._lanes.get((mode, model))
        if lane is not None:
            lane.tickets[ticket] = None  # behind a head that cannot enter either
            return ()
        self._lanes[mode, model] = Lane(ticket)
        return self._admit(now)

    def leave(self, ticket: Ticket, now: float) -> Sequence[Ticket]:
        """Ends a wait or a hold, whatever ended it. Raises ValueError for one that is not in line."""
        if ticket.arrived is None or ticket.released is not None:
            raise ValueError(f"ticket {ticket.id} is not in line")
        ticket.released = now
        mode, model = ticket.mode, ticket.model
        if ticket.granted is None:
            lane = self._lanes[mode, model]
            was_head = ticket is lane.head
            if not lane.remove(ticket):
                del self._lanes[mode, model]
            # Also after one who gave up: it may have been the head that held back those behind it.
            return self._admit(now) if was_head else ()
        counts = self._beside if mode is NONE else self._models
        left = counts[model] - 1
        if left:
            counts[model] = left
        else:
            del counts[model]
        if mode is WRITE:
            self._writing = False
        if ticket.room is not None:
            self._exit(ticket.room, now)
        return self._admit(now) if self._lanes else ()

    def opened(self, ticket: Ticket, now: float) -> None:
        """The first byte of the ticket's answer: its room has opened."""
        ticket.opened = now
        room = ticket.room
        if room is not None and room.opened is None:
            room.opened, room.batch = now, self._count

    def reconfigure(self, policy: Policy, residency: Residency | None, now: float) -> Sequence[Ticket]:
        """Other rules from now on. Everyone keeps their place; some may enter now."""
        self._policy = policy
        self._phases = policy.order == "phases"
        self._residency = residency
        if not self._phases:
            self._rooms = []
        return self._admit(now)

    # The three questions

    def _has_capacity(self, ticket: Ticket) -> bool:
        limit, model = ticket.limit, ticket.model
        return limit is None or self._models.get(model, 0) + self._beside.get(model, 0) < limit

    def _fits(self, mode: Mode, model: str) -> bool:
        if mode is NONE:
            return True
        if mode is WRITE:
            return not self._models
        if self._writing:
            return False
        models = self._models
        return self._residency is None or model in models or self._residency.admits(frozenset(models), model)

    def _hinders(self, lane: Lane, waiter: Lane) -> bool:
        if lane.mode is NONE or waiter.mode is NONE:
            return False
        if lane.mode is WRITE or waiter.mode is WRITE:
            return True
        if self._residency is None or lane.model == waiter.model:
            return False
        return self._residency.hinders(frozenset(self._models), waiter.model, lane.model)

    # Grants

    def _admit(self, now: float) -> Sequence[Ticket]:
        granted: list[Ticket] = []
        while self._lanes:
            while self._lanes and (entry := self._next(now)) is not None:
                ticket = entry.lane.head
                if not entry.lane.remove(ticket):
                    del self._lanes[ticket.mode, ticket.model]
                ticket.overtakes = entry.overtakes
                self._grant(ticket, entry.room, now)
                granted.append(ticket)
            # Only now: a room without holders is still a room while its next writer may follow.
            lived = [room for room in self._rooms if room.holders]
            if len(lived) == len(self._rooms):
                break
            self._rooms = lived  # and who was in one that is over may join another
        return granted

    def _next(self, now: float) -> _Entry | None:
        lanes = sorted(self._lanes.values(), key=lambda lane: lane.head.number)
        able = [
            (lane, [older for older in lanes[:place] if self._hinders(lane, older)])
            for place, lane in enumerate(lanes)
            if self._has_capacity(lane.head) and self._fits(lane.mode, lane.model)
        ]
        # Those who may pass somebody come first: their phase ends before the next one begins.
        for lane, passed in able:
            if passed and (room := self._licence(lane, passed, now)) is not None:
                return _Entry(lane, room, overtakes=True)
        for lane, passed in able:
            if not passed:
                return _Entry(lane, None, overtakes=False)
        return None

    def _grant(self, ticket: Ticket, room: Room | None, now: float) -> None:
        mode, model = ticket.mode, ticket.model
        ticket.granted = now
        if mode is NONE:
            self._beside[model] = self._beside.get(model, 0) + 1
            return
        models = self._models
        if self._residency is not None and (name := self._residency.id(model)) not in self.resident:
            self.resident = self._residency.after(self.resident, frozenset(models), model)
            ticket.swaps = name in self.resident
        models[model] = models[model] + 1 if model in models else 1
        if mode is WRITE:
            self._writing = True
        if self._phases:
            self._enter(ticket, room, now)

    # Rooms

    def _enter(self, ticket: Ticket, room: Room | None, now: float) -> None:
        """Into `room`, else the one its model is in, else a new one."""
        mode, model, rooms = ticket.mode, ticket.model, self._rooms
        if room is None and rooms:
            room = self._home(mode, model)
            if room is None:
                # Rooms that exclude the new one are over, even where a model of theirs that it can live with is held.
                self._rooms = rooms = [other for other in rooms if not self._excludes(other, mode, model)]
        if room is None:
            room = Room(mode, {model}, now)
            rooms.append(room)
        else:
            room.models.add(model)
        room.holders += 1
        ticket.room = room

    def _exit(self, room: Room, now: float) -> None:
        room.holders -= 1
        if room.opened is None:
            room.opened, room.batch = now, self._count
        if not room.holders and not self._lanes and room in self._rooms:
            self._rooms.remove(room)

    def _home(self, mode: Mode, model: str) -> Room | None:
        """The room that a model is in already. Without residency all readers are one room, each write model is one."""
        for room in self._rooms:
            if room.mode is mode and (model in room.models or (self._residency is None and mode is READ)):
                return room
        return None

    def _excludes(self, room: Room, mode: Mode, model: str) -> bool:
        if room.mode is WRITE or mode is WRITE:
            return True
        return self._residency is not None and not self._residency.admits(frozenset(room.models), model)

    def _licence(self, lane: Lane, passed: Sequence[Lane], now: float) -> Room | None:
        """The room by whose rules the head of `lane` may pass the older heads of `passed`, oldest first."""
        home = self._home(lane.mode, lane.model)
        for room in self._rooms if home is None else (home,):
            if (
                room.mode is lane.mode
                and (room is home or self._could_join(room, lane.model))
                and self._is_open(room, lane, passed[0], now)
            ):
                return room
        return None

    def _could_join(self, room: Room, model: str) -> bool:
        return self._residency is not None and self._residency.admits(frozenset(room.models), model)

    def _is_open(self, room: Room, lane: Lane, oldest: Lane, now: float) -> bool:
        """The numbers are those of the rules above."""
        if room.opened is None:  # (1)
            return True
        if lane.head.number <= room.batch:  # (2)
            return True
        policy = self._policy
        slice_ = min(room.opened - room.since, policy.max_slice) if policy.slice == "auto" else policy.slice
        if now - room.opened < slice_:  # (3)
            return True
        if policy.patience <= 0 or oldest.head.arrived is None:
            return False
        usual = 0.0
        if self._usual is not None:
            usual = self._usual.length(lane.model) + self._usual.opening(oldest.model)
        return now - oldest.head.arrived + usual < policy.patience
