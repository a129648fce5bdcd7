"""What a lease looks like at one moment: plain data for pages, logs and programs."""

from dataclasses import dataclass

from proxy.line import Mode


@dataclass(frozen=True, slots=True)
class Holder:
    """One who holds, in a snapshot. `held`: seconds since the grant; `opened`: its answer has begun; `number`: the
    ticket's own, by which the feed of events names it."""

    id: str
    model: str
    group: str
    mode: Mode
    waited: float
    held: float
    opened: bool
    number: int


@dataclass(frozen=True, slots=True)
class Waiter:
    """One who waits, in a snapshot. `position` counts from 1, by age; `waited`: seconds so far."""

    id: str
    model: str
    group: str
    mode: Mode
    waited: float
    position: int
    number: int


@dataclass(frozen=True, slots=True)
class RoomView:
    """One room, in a snapshot: seconds since its first grant, and since it has opened (None: it opens)."""

    mode: Mode
    models: tuple[str, ...]
    since: float
    open_for: float | None


@dataclass(frozen=True, slots=True)
class LeaseSnapshot:
    """A lease at one moment. `room`: the models that hold it; `rules`: which exclude which, in words."""

    name: str
    order: str
    closed: bool
    holders: tuple[Holder, ...]
    waiting: tuple[Waiter, ...]
    room: tuple[str, ...]
    rooms: tuple[RoomView, ...]
    resident: tuple[str, ...]
    rules: tuple[str, ...]
