"""A gate holds one request of a fake at a chosen point until the test opens it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Gate:
    """Holds one request before its headers (`after` None), or once `after` bytes of its answer's body are sent.

    `reached` is set when the request stands at the gate. A gate that is opened early holds nobody.
    """

    after: int | None = None
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    later: list["Gate"] = field(default_factory=list)

    def open(self) -> None:
        """Let the request go on."""
        self.opened.set()

    def then(self, after: int) -> "Gate":
        """One more gate for the same request, further on."""
        self.later.append(Gate(after))
        return self.later[-1]

    async def __call__(self) -> None:
        self.reached.set()
        await self.opened.wait()


async def send_past(gate: Gate | None, sent: int, piece: bytes, send: Callable[[bytes], Awaitable[None]]) -> int:
    """Send a piece that follows `sent` bytes, split wherever a gate stands. Returns the bytes sent so far."""
    gates = [gate, *gate.later] if gate else []
    for at, stop in sorted(((g.after, g) for g in gates if g.after is not None), key=lambda pair: pair[0]):
        if stop.reached.is_set() or at > sent + len(piece):
            continue
        if at > sent:
            await send(piece[: at - sent])
            piece, sent = piece[at - sent :], at
        await stop()
    if piece:
        await send(piece)
    return sent + len(piece)
