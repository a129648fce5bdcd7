"""Small words for telling stories about lines and leases."""

import asyncio
from collections.abc import Iterable

from proxy.line import Line, Mode, Policy, Ticket

FIFO = Policy(order="fifo")
PHASES = Policy(order="phases")


def read(model: str = "chat", limit: int | None = None) -> Ticket:
    return Ticket(f"read-{model}", model, "g", Mode.READ, limit)


def write(model: str = "tts", limit: int | None = None) -> Ticket:
    return Ticket(f"write-{model}", model, "g", Mode.WRITE, limit)


def none(model: str = "embed", limit: int | None = None) -> Ticket:
    return Ticket(f"none-{model}", model, "g", Mode.NONE, limit)


def holds(*tickets: Ticket) -> bool:
    return all(ticket.granted is not None and ticket.released is None for ticket in tickets)


def waits(*tickets: Ticket) -> bool:
    return all(ticket.granted is None and ticket.released is None for ticket in tickets)


def join(line: Line, tickets: Iterable[Ticket], now: float = 0.0) -> None:
    for ticket in tickets:
        line.join(ticket, now)


async def settle() -> None:
    """Lets every task run until it waits for something outside."""
    for _ in range(20):
        await asyncio.sleep(0)


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
