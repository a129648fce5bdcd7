"""What requests and loads usually take: moving averages of what was seen. Plain data; no clock."""

from proxy.line import Ticket


class Averages:
    """Exponential moving averages by key: each new value counts for a fifth. Keeps the keys used last."""

    __slots__ = ("_keys", "_values", "_weight")

    def __init__(self, *, weight: float = 0.2, keys: int = 512) -> None:
        self._weight = weight
        self._keys = keys
        self._values: dict[str, float] = {}

    def get(self, key: str) -> float | None:
        return self._values.get(key)

    def add(self, key: str, value: float) -> None:
        values = self._values
        old = values.pop(key, None)
        values[key] = value if old is None else old + self._weight * (value - old)
        if len(values) > self._keys:  # model names are the clients' to choose
            del values[next(iter(values))]


class Usual:
    """Usual times in seconds, learned from tickets that have been released; 0 where nothing is known."""

    def __init__(self) -> None:
        self._length = Averages()
        self._opening = Averages()
        self._wait = Averages(keys=1)

    def length(self, model: str) -> float:
        """One request of a model that is resident, from its grant to its end."""
        return self._length.get(model) or 0.0

    def opening(self, model: str) -> float:
        """From a grant that swaps to the first byte of an answer."""
        return self._opening.get(model) or 0.0

    def wait(self) -> float:
        """From joining the line to the grant, of those who had to wait."""
        return self._wait.get("") or 0.0

    def learn(self, ticket: Ticket) -> None:
        """Takes in what a released ticket tells. One that never answered tells only how long it waited."""
        arrived, granted, opened, released = ticket.arrived, ticket.granted, ticket.opened, ticket.released
        if arrived is None or granted is None or released is None:
            return
        if granted > arrived:
            self._wait.add("", granted - arrived)
        if opened is None:
            return
        room = ticket.room
        if ticket.swaps:
            self._opening.add(ticket.model, opened - granted)
        loading = ticket.swaps or (room is not None and room.opened is not None and granted < room.opened)
        if not loading:
            self._length.add(ticket.model, released - granted)
        elif self._length.get(ticket.model) is None:
            # Nothing better is known yet: without the load, which for an answer in one piece leaves too little.
            self._length.add(ticket.model, released - opened)
