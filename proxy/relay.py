"""Our side of one answer: written as it comes, whatever the client's pace, and ended so that the client understands.

1. `write` never waits for the client. What its connection does not take at once is spooled, in memory and then in a
   temporary file, so the lease ends with the upstream's last byte; `finish` waits for the client, after the lease.
2. Nothing may be sent for long while a request waits: `KeepAlive` commits to an event stream after a grace, so that
   cheap refusals keep their status, and then sends what each protocol ignores.
3. An answer that breaks off is never ended properly: an error event where there is a place for one, then the
   connection is cut. Both OpenAI SDKs take a clean end without `[DONE]` for a short success.
"""

import asyncio
import json
import logging
import socket
import struct
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from aiohttp import web
from multidict import CIMultiDict

from proxy import sse
from proxy.errors import ProxyError
from proxy.spool import Closed, Spool

logger = logging.getLogger(__name__)

_SOCKET_BUFFER = 1 << 20
_SPOOL_LIMIT = 1 << 28
_STALL = 600.0

JSON_HEAD: Mapping[str, str] = {"Content-Type": "application/json"}


class ClientGone(Exception):
    """The client's connection is closed. Nobody's error."""


class ClientStream:
    """The response to one request. Not started until `start`; then `write`...; then one of `finish`, `fail`, `cut`.

    Or, for an answer that is there as a whole, `give` and `finish`; it starts with `finish`.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None
        self._spool: Spool | None = None
        self._drain: asyncio.Task[None] | None = None
        self.sent = 0
        """Bytes of the answer, keep-alives not counted."""
        self.events: sse.EventScanner | None = None
        """Watches the answer where it is an event stream."""

    @property
    def started(self) -> bool:
        """The status line is sent: errors can no longer change it."""
        return self._response is not None and self._response.prepared

    @property
    def response(self) -> web.StreamResponse:
        """The response; only once started."""
        assert self._response is not None
        return self._response

    async def start(self, status: int, reason: str | None, headers: "CIMultiDict[str] | Mapping[str, str]") -> None:
        """Send the head. Raises ClientGone."""
        self._response = web.StreamResponse(status=status, reason=reason, headers=CIMultiDict(headers))
        if (transport := self._request.transport) is None:
            raise ClientGone
        transport.set_write_buffer_limits(high=_SOCKET_BUFFER)
        try:
            await self._response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone from error

    def give(self, status: int, reason: str | None, headers: "CIMultiDict[str]", body: bytes) -> None:
        """The whole answer, `body` not empty. `finish` sends head and body in one piece."""
        self._response = web.Response(status=status, reason=reason, headers=headers, body=body)
        self.sent = len(body)

    async def write(self, data: bytes, *, answer: bool = True) -> None:
        """Send, or keep for a slow client. Raises ClientGone; never waits for the client."""
        if answer:
            self.sent += len(data)
        if self._spool is None:
            transport = self._request.transport
            if transport is None or transport.is_closing():
                raise ClientGone
            # Below the high-water mark aiohttp's write does not wait either.
            if transport.get_write_buffer_size() + len(data) < _SOCKET_BUFFER - 1024:
                try:
                    await self.response.write(data)
                except ConnectionError as error:
                    raise ClientGone from error
                return
            self._spool = Spool(limit=_SPOOL_LIMIT)
            self._drain = asyncio.create_task(self._send_spooled(self._spool))
        if self._drain is not None and self._drain.done():  # the client has gone, or has read nothing for too long
            self.abort()
            raise ClientGone from self._drain.exception()
        if self._spool.size + len(data) > _SPOOL_LIMIT:
            logger.warning("a client is %d bytes behind; its connection is cut", self._spool.size)
            self.abort()
            raise ClientGone
        self._spool.put(data)

    async def finish(self) -> web.StreamResponse:
        """Wait until the client has everything. Raises ClientGone."""
        try:
            if self._spool is not None and self._drain is not None:
                self._spool.finish()
                await self._drain
            await self.response.prepare(self._request)  # nothing to do but for an answer that was given as a whole
            await self.response.write_eof()
        except (ConnectionError, Closed, TimeoutError) as error:
            self.abort()
            raise ClientGone from error
        finally:
            self.close()
        return self.response

    async def fail(self, error: ProxyError, protocol: sse.Protocol) -> None:
        """End a started answer with an error: an event where the answer is an event stream, then the cut.

        Behind the white space of a JSON answer the error is for people: programs see the cut.
        """
        try:
            if self.response.content_type == "text/event-stream":
                separator = self.events.separator if self.events else b""
                await self.write(separator + sse.error_event(error, protocol), answer=False)
            elif self.response.content_type == "application/json" and not self.sent:
                said = error.anthropic_body() if protocol == "anthropic" else error.body()
                await self.write(json.dumps(said).encode(), answer=False)
            if self._spool is not None and self._drain is not None:
                self._spool.finish()
                await self._drain
        except (ClientGone, ConnectionError, Closed, TimeoutError):
            pass  # the one to be told has gone
        self.cut()

    def cut(self) -> None:
        """End a started answer so that nobody takes it for whole."""
        self.close()
        cut(self._request)

    def abort(self) -> None:
        """Close the connection now; what was not sent is dropped."""
        self.close()
        if (transport := self._request.transport) is not None:
            transport.abort()

    def close(self) -> None:
        """Free the spool. Idempotent."""
        if self._drain is not None:
            self._drain.cancel()
        if self._spool is not None:
            self._spool.close()

    async def _send_spooled(self, spool: Spool) -> None:
        while (data := await spool.take()) is not None:
            async with asyncio.timeout(_STALL):
                await self.response.write(data)


def cut(request: web.Request) -> None:
    """Close the connection after what was written, without the end that would make the answer look whole."""
    if (transport := request.transport) is not None:
        if request.version < (1, 1):
            # HTTP/1.0 has no last chunk to leave out: there only a reset tells the client. One that lingers for no time.
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.close()


class KeepAlive:
    """While its block runs and `stop` was not called: after `grace` seconds the head, then something every `interval`.

    kind: "comment" (SSE), "ping" (/v1/messages), "chunk" (an empty chat.completion.chunk, for clients whose clocks
    only parsed chunks reset), "space" (JSON: leading white space), "off".
    """

    def __init__(
        self, client: ClientStream, kind: sse.BeatKind, *, grace: float, interval: float, model: str = ""
    ) -> None:
        self._client = client
        self.kind = kind
        self._grace, self._interval = grace, interval
        self._model = model
        self._running: tuple[asyncio.Task[None], asyncio.Event] | None = None
        self.beats = 0

    async def __aenter__(self) -> Self:
        self._begin(self._grace)
        return self

    def resume(self) -> None:
        """Beat again, an interval from now: the head of the answer is there, its first byte is not."""
        self._begin(self._interval)

    def _begin(self, wait: float) -> None:
        if self.kind != "off":
            stop = asyncio.Event()
            self._running = asyncio.create_task(self._run(wait, stop)), stop

    async def __aexit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Returns when nothing more will be written; to be called before the first real byte. Idempotent."""
        if self._running is not None:
            (task, stop), self._running = self._running, None
            stop.set()  # not a cancellation: that could cut a head in two
            await task

    async def _run(self, wait: float, stop: asyncio.Event) -> None:
        while True:
            try:
                async with asyncio.timeout(wait):
                    await stop.wait()
                return
            except TimeoutError:
                wait = self._interval
            try:
                if not self._client.started:
                    await self._client.start(200, None, JSON_HEAD if self.kind == "space" else sse.headers())
                await self._client.write(sse.beat(self.kind, self._model), answer=False)
                self.beats += 1
            except ClientGone:
                return  # its handler is being cancelled
