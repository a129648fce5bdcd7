"""Upstreams that misbehave: a server made of bare sockets, told answer by answer what to do (tests/fakes/faults.py).

`async with FaultyUpstream(busy(1), ok) as upstream:` gives the first request a 429 and all later ones an answer.
"""

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Self

from tests.fakes.answers import JSON, SSE


class Exchange:
    """One request of the client and the means to answer it, byte by byte.

    `gone` is set when the client closes its side while the behaviour still runs.
    """

    def __init__(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.writer = writer
        self.gone = asyncio.Event()

    @property
    def wants_stream(self) -> bool:
        return b'"stream": true' in self.body or b'"stream":true' in self.body

    async def head(self, status: int, headers: Mapping[str, str], reason: str = "Fake") -> None:
        """The status line and headers, nothing added."""
        lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
        await self.raw("\r\n".join(lines).encode() + b"\r\n\r\n")

    async def raw(self, data: bytes) -> None:
        """Bytes as they are. Raises ConnectionError when the client has gone."""
        self.writer.write(data)
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        """One chunk of a chunked body."""
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        """The last chunk."""
        await self.raw(b"0\r\n\r\n")

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """A complete answer with its length."""
        await self.head(status, {"Content-Type": JSON, **(headers or {}), "Content-Length": str(len(body))})
        await self.raw(body)

    async def open_stream(self) -> None:
        """The head of a chunked SSE answer."""
        await self.head(200, {"Content-Type": SSE, "Transfer-Encoding": "chunked"})

    def cut(self) -> None:
        """Reset the connection."""
        self.writer.transport.abort()


Behaviour = Callable[[Exchange], Awaitable[None]]


class FaultyUpstream:
    """Each request takes the next behaviour; the last one is for all that follow."""

    def __init__(self, *behaviours: Behaviour) -> None:
        self._next = iter(itertools.chain(behaviours, itertools.repeat(behaviours[-1])))
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.exchanges: list[Exchange] = []
        self.arrived = asyncio.Event()
        self.open_connections = 0
        self.url = ""

    async def until(self, requests: int) -> Exchange:
        """Wait until so many requests have arrived; the last of them."""
        while len(self.exchanges) < requests:
            self.arrived.clear()
            await self.arrived.wait()
        return self.exchanges[requests - 1]

    async def start(self, port: int = 0) -> None:
        """Listen on this port of 127.0.0.1, or a free one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Protocol(self._connected), "127.0.0.1", port)
        self.url = "http://{}:{}".format(*self._server.sockets[0].getsockname())

    async def close(self) -> None:
        """Cut everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server:
            self._server.close()
            await self._server.wait_closed()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        protocol = writer.transport.get_protocol()
        assert isinstance(protocol, _Protocol)
        left = protocol.left
        self._tasks.add(task)
        self.open_connections += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while (exchange := await _read_request(reader, writer)) and not writer.is_closing():
                    self.exchanges.append(exchange)
                    self.arrived.set()
                    await self._answer(exchange, left)
        finally:
            self._tasks.discard(task)
            self.open_connections -= 1
            writer.close()

    async def _answer(self, exchange: Exchange, left: asyncio.Event) -> None:
        answering = asyncio.ensure_future(next(self._next)(exchange))
        leaving = asyncio.ensure_future(left.wait())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                exchange.gone.set()
            await answering
        except ConnectionError:
            exchange.gone.set()
            raise
        finally:
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Exchange | None:
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except asyncio.IncompleteReadError:
        return None
    method, target, _ = lines[0].split(" ", 2)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    if headers.get("transfer-encoding", "").lower() == "chunked":
        async for piece in _chunks(reader):
            body += piece
    return Exchange(method, target, headers, body, writer)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readline()
    await reader.readline()


class _Protocol(asyncio.StreamReaderProtocol):
    """Also knows that the peer has closed, without reading from the stream."""

    def __init__(self, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        super().__init__(asyncio.StreamReader(), serve)
        self.left = asyncio.Event()

    def eof_received(self) -> bool:
        self.left.set()
        super().eof_received()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.left.set()
        super().connection_lost(exc)


@contextlib.contextmanager
def refusing_url() -> Iterator[str]:
    """An address of 127.0.0.1 that refuses connections for as long as the context lasts."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # bound, but nobody listens
        yield "http://{}:{}".format(*holder.getsockname())
