"""One exchange with an upstream: the request goes out as it came, the answer comes back as it comes.

The caller holds the lease. When `exchange` returns or raises, the exchange is over: the last byte was read, or the
connection is closed, so that a swapper sees no request in flight.

1. Hop-by-hop headers stay on their hop, both ways. The client's key stays here; the upstream's own is put in.
2. While nothing was sent to the client, what may pass is waited out: a refused connection and 503 (the model server is
   starting or loading), a 429 with Retry-After. At most `load_timeout`, counted from the grant; then the model counts
   as failed for `failed_load_backoff`, and requests for it are refused before they take the lease.
3. Only the calls to the upstream are translated into UpstreamError: writing to our own client raises the same classes
   of aiohttp, and a client that hung up is nobody's error.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.tracing import Trace
from multidict import CIMultiDict
from yarl import URL

from proxy import sse
from proxy.body import Body
from proxy.config import Upstream as UpstreamConfig
from proxy.errors import ModelUnavailable, ProxyError, UpstreamError, UpstreamTimeout, UpstreamTruncated
from proxy.headers import returned_headers, sent_headers
from proxy.relay import ClientStream, KeepAlive

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_ERROR_BODY = 1 << 16
_SENT_AT_ONCE = 1 << 15  # bytes that a new request's connection takes without waiting for the upstream


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request as it leaves. `target`: path and query as they came; `path`: the normalised path."""

    method: str
    target: str
    path: str
    headers: "CIMultiDict[str]"
    body: Body | None
    model: str
    request_id: str
    protocol: sse.Protocol = "openai"


def session() -> aiohttp.ClientSession:
    """The client that all upstreams share. Close it at the end."""
    return aiohttp.ClientSession(
        # Below the 5 s after which uvicorn closes an idle connection: a request must not meet that moment.
        connector=_Connector(limit=0, keepalive_timeout=4.0, ttl_dns_cache=10),
        auto_decompress=False,
        max_line_size=1 << 16,
        max_field_size=1 << 16,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        trust_env=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )


# Whether the request that the current task sends got a connection that had been used before.
_reused: ContextVar[bool] = ContextVar("reused", default=False)


class _Connector(aiohttp.TCPConnector):
    """Notes when a request needs a new connection; a TraceConfig would tell the same at many times the cost."""

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        _reused.set(False)
        return await super()._create_connection(req, traces, timeout)


class Upstream:
    """One model server. `on_error(kind)` counts: connect, timeout, reset, truncated, 5xx, 429."""

    def __init__(
        self, name: str, config: UpstreamConfig, client: aiohttp.ClientSession, on_error: Callable[[str], None]
    ) -> None:
        self.name = name
        self.config = config
        self.client = client
        self.count_error = on_error
        limits = config.timeouts
        self._timeout = aiohttp.ClientTimeout(
            total=None, connect=limits.connect, sock_connect=limits.connect, sock_read=limits.first_byte
        )
        self._failed: dict[str, tuple[float, str]] = {}

    def refuse_failed(self, model: str) -> None:
        """Raises ModelUnavailable while the model's last load is known to have failed; call before the lease."""
        until, why = self._failed.get(model, (0.0, ""))
        if (left := until - time.monotonic()) > 0:
            raise ModelUnavailable(
                f"the model '{model}' did not load a moment ago ({why}); the next try is in {left:.0f} s",
                param="model",
                code="model_failed",
                headers={"Retry-After": str(max(1, round(left)))},
            )
        self._failed.pop(model, None)

    async def exchange(
        self, out: Outgoing, client: ClientStream, keep_alive: KeepAlive, opened: Callable[[], None]
    ) -> None:
        """Send the request, relay the answer to its last byte.

        `opened` is called when the first byte of the answer's body is there. Raises UpstreamError, also when the
        answer has begun (`client.started` tells), and ClientGone.
        """
        answer = await self._answer(out)
        try:
            await keep_alive.stop()
            if client.started and not _continues(client, answer):
                raise await self._late_error(answer)
            if answer.content_type == "text/event-stream" and not _encoded(answer):
                client.events = sse.EventScanner(out.path)
            elif not client.started and (body := _whole(answer)):
                opened()
                client.give(answer.status, answer.reason, _head(answer), body)
                return
            if not client.started:
                await client.start(answer.status, answer.reason, _head(answer))
                if client.events is not None:
                    keep_alive.resume()
            try:
                await self._relay(answer, client, keep_alive, opened)
            finally:
                await keep_alive.stop()
        finally:
            answer.close()  # a finished answer has given its connection back already

    async def call(self, out: Outgoing) -> bytes:
        """The whole body of an answer, for work of our own. Raises UpstreamError; with the answer's status if not 200."""
        answer = await self._answer(out)
        try:
            if answer.status != 200:
                raise await self._late_error(answer)
            return b"".join([data async for data in self._body(answer)])
        finally:
            answer.close()

    async def _relay(
        self, answer: aiohttp.ClientResponse, client: ClientStream, keep_alive: KeepAlive, opened: Callable[[], None]
    ) -> None:
        first = True
        async for data in self._body(answer):
            if first:
                first = False
                opened()
                await keep_alive.stop()
            piece = client.events.feed(data) if client.events else data
            if piece:
                await client.write(piece)
        if client.events is not None:
            if rest := client.events.rest():
                await client.write(rest)
            if not client.events.complete and answer.status == 200:
                self.count_error("truncated")
                why = f": {client.events.appended}" if client.events.appended else ""
                raise UpstreamTruncated(
                    f"the upstream '{self.name}' ended its stream before the answer was complete{why}"
                )

    async def _answer(self, out: Outgoing) -> aiohttp.ClientResponse:
        """The head of the answer, after what can be waited out was waited out: nothing where no model can be loading.

        The caller closes it. Raises UpstreamError.
        """
        deadline = time.monotonic() + (self.config.load_timeout if out.model else 0.0)
        pause = _FIRST_PAUSE
        while True:
            try:
                answer = await self._send(out)
            except _Refused as error:
                if time.monotonic() + pause >= deadline:
                    self.count_error("connect")
                    self._fail(out.model, "nothing listens there")
                    raise UpstreamError(f"the upstream '{self.name}' cannot be reached: {error}") from error
            except _Disconnected as error:
                # A connection that was kept open and died unused says nothing about the server: once more.
                if not _reused.get():
                    self.count_error("reset")
                    raise UpstreamError(
                        f"the upstream '{self.name}' closed the connection before it answered", code="upstream_reset"
                    ) from error
                continue
            else:
                pause = max(pause, _retry_after(answer))
                if not self._passes(answer, time.monotonic() + pause < deadline):
                    break
                answer.close()
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)
        if answer.status == 503:
            self._fail(out.model, "it answered 503 for all of load_timeout")
        if answer.status == 429 or answer.status >= 500:
            self.count_error("429" if answer.status == 429 else "5xx")
        return answer

    def _passes(self, answer: aiohttp.ClientResponse, in_time: bool) -> bool:
        """True for an answer that says: later."""
        later = answer.status == 503 or (answer.status == 429 and "Retry-After" in answer.headers)
        return later and in_time

    async def _send(self, out: Outgoing) -> aiohttp.ClientResponse:
        """One try. Raises _Refused, _Disconnected, UpstreamTimeout, UpstreamError."""
        _reused.set(True)
        limits = self.config.timeouts
        request = self.client.request(
            out.method,
            URL(self.config.url + out.target, encoded=True),
            headers=self._headers(out),
            data=out.body.payload() if out.body is not None else None,
            allow_redirects=False,
            timeout=self._timeout,
        )
        try:
            if out.body is None or out.body.size <= _SENT_AT_ONCE:
                answer = await request
            else:  # the connection's own clock starts behind the body
                async with asyncio.timeout(limits.first_byte):
                    answer = await request
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise self._translated(error) from error
        if (connection := answer.connection) is not None and connection.protocol is not None:
            connection.protocol.read_timeout = limits.idle
            connection.protocol.start_timeout()
        return answer

    async def _body(self, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """The pieces of the answer as they arrive. Raises UpstreamError when it breaks off or falls silent."""
        while True:
            try:
                data = await answer.content.readany()
            except TimeoutError as error:
                self.count_error("timeout")
                idle = self.config.timeouts.idle
                message = f"the upstream '{self.name}' sent nothing for {idle:g} s in the middle of its answer"
                raise UpstreamTimeout(message) from error
            except (aiohttp.ClientError, ConnectionError) as error:
                self.count_error("truncated")
                message = f"the upstream '{self.name}' broke off in the middle of its answer"
                raise UpstreamTruncated(message) from error
            if not data:
                return
            yield data

    def _translated(self, error: Exception) -> Exception:
        """What aiohttp raised while an answer was waited for, in our words, and counted where no other try follows."""
        match error:
            case aiohttp.ConnectionTimeoutError():
                self.count_error("connect")
                connect = self.config.timeouts.connect
                return UpstreamError(f"the upstream '{self.name}' took longer than {connect:g} s to connect")
            case aiohttp.ClientConnectorError():
                return _Refused(str(error))
            case TimeoutError():
                self.count_error("timeout")
                return UpstreamTimeout(
                    f"the upstream '{self.name}' did not begin to answer within {self.config.timeouts.first_byte:g} s"
                )
            case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError() | ConnectionError():
                return _Disconnected(str(error))
            case _:
                self.count_error("reset")
                return UpstreamError(f"the upstream '{self.name}' does not speak HTTP as it should: {error}")

    def _headers(self, out: Outgoing) -> "CIMultiDict[str]":
        headers = sent_headers(out.headers, self.config, out.request_id)
        if out.body is not None:
            headers["Content-Length"] = str(out.body.size)
        return headers

    async def _late_error(self, answer: aiohttp.ClientResponse) -> ProxyError:
        """The answer is not the event stream that the client was promised while it waited: say what it is."""
        body = b""
        with suppress(aiohttp.ClientError, ConnectionError, TimeoutError):  # then its status must do
            body = await answer.content.read(_ERROR_BODY)
        text = body.decode("utf-8", "replace").strip()
        message = f"the upstream '{self.name}' answered {answer.status} {answer.reason}: {text[:1000]}"
        error = UpstreamError(message, code="upstream_error" if answer.status >= 400 else "upstream_not_streaming")
        error.status = answer.status if answer.status >= 400 else 502
        return error

    def _fail(self, model: str, why: str) -> None:
        backoff = self.config.failed_load_backoff
        if model and backoff > 0:
            self._failed[model] = (time.monotonic() + backoff, why)
            logger.warning(
                "model failed to load upstream=%s model=%s: %s; not tried for %g s", self.name, model, why, backoff
            )


async def fetch(upstream: Upstream, path: str, *, patience: float = 10.0) -> tuple[int, "CIMultiDict[str]", bytes]:
    """A short answer of an upstream, whole, within `patience` seconds: status, headers, body. Raises UpstreamError."""
    try:
        async with upstream.client.get(
            upstream.config.url + path,
            headers=sent_headers(CIMultiDict(), upstream.config, ""),
            timeout=aiohttp.ClientTimeout(total=patience),
        ) as answer:
            return answer.status, returned_headers(answer.headers), await answer.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise UpstreamError(f"the upstream '{upstream.name}' cannot be reached: {error}") from error


class _Refused(Exception):
    """Nothing listens at the upstream's address."""


class _Disconnected(Exception):
    """The connection closed before the head of an answer."""


def _head(answer: aiohttp.ClientResponse) -> "CIMultiDict[str]":
    headers = returned_headers(answer.headers)
    streamed = answer.content_type.startswith("audio/") and "Content-Length" not in headers
    if streamed or answer.content_type == "text/event-stream":
        headers.setdefault("X-Accel-Buffering", "no")
        headers.setdefault("Cache-Control", "no-cache")
    if answer.content_type == "text/event-stream":
        headers.popall("Content-Length", None)  # an error event may have to follow
    return headers


def _whole(answer: aiohttp.ClientResponse) -> bytes:
    """The body, where all of it has come with the head; b"" where there is more to wait for, or none."""
    content = answer.content
    return content.read_nowait() if content.is_eof() and content.exception() is None else b""


def _encoded(answer: aiohttp.ClientResponse) -> bool:
    return answer.headers.get("Content-Encoding", "identity").lower() != "identity"


def _retry_after(answer: aiohttp.ClientResponse) -> float:
    """Seconds of a Retry-After header, 0 where there is none that is a number."""
    try:
        return max(0.0, float(answer.headers.get("Retry-After", "0")))
    except ValueError:
        return 0.0


def _continues(client: ClientStream, answer: aiohttp.ClientResponse) -> bool:
    """Whether the answer fits the head that a keep-alive has already sent."""
    begun: str = client.response.content_type
    fits = begun == "application/json" or (answer.status == 200 and answer.content_type == begun)
    return fits and not _encoded(answer)
