"""The short path of a request: body, plan, lease, then forward or speak. The order is the design.

1. The WHOLE body is read, so that a slow uploader never holds the GPU.
2. The plan is made; bad input stops here and takes no lease.
3. The lease is taken before anything is sent, so that no timeout of an upstream runs while the request waits.
4. The exchange with the upstream, or the synthesis, is over before the lease is released.
5. What a slow client has not read yet is sent after the lease.

No other module takes a lease, but for what `Runtime.hold_model` gives to speech jobs.
"""

import asyncio
import functools
import logging
import math
import re
import time
from collections.abc import Callable
from types import TracebackType
from urllib.parse import quote

from aiohttp import hdrs, web
from multidict import CIMultiDict
from yarl import URL

from proxy import body as bodies
from proxy import cors, facts, sse, websocket
from proxy.body import Body, Found
from proxy.classify import ALL_MODELS, Plan, Source, source
from proxy.errors import BadRequest, Forbidden, ProxyError
from proxy.facts import Facts
from proxy.forward import Outgoing
from proxy.lease import Hold
from proxy.relay import ClientGone, ClientStream, KeepAlive
from proxy.runtime import Runtime
from proxy.speech import SpeechRequest, SpeechStream, parse

logger = logging.getLogger(__name__)

_ANTHROPIC = re.compile(r"(?:/upstream/.*)?/v1?/messages(?:/.*)?")


class Handler:
    """Answers every request that is not one of the proxy's own pages."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Raises ProxyError until the answer has begun; later errors end the answer."""
        fact = facts.of(request)
        if websocket.asks(request):
            return await self._websocket(request, fact)
        body = await Body.read(request.content, self._runtime.config.max_body) if request.body_exists else None
        try:
            return await self._with_body(request, body, fact)
        finally:
            if body is not None:
                body.close()

    async def handle_read(self, request: web.Request, body: Body) -> web.StreamResponse:
        """`handle` for a request whose body has been read elsewhere; the caller closes it."""
        return await self._with_body(request, body, facts.of(request))

    async def _with_body(self, request: web.Request, body: Body | None, fact: Facts) -> web.StreamResponse:
        where = source(request.method, fact.path)
        found = None
        if where is Source.BODY:
            found = await self._find_model(request, body)
        named = found.model if found is not None else request.query.get("model")
        plan = self._plan(request, fact, named, where)
        if plan.backend is not None:
            return await self._local(request, body, plan, fact)
        if found is not None and body is not None and plan.model != found.model:
            body = await bodies.rename_model(
                body,
                found,
                plan.model,
                request.headers.get(hdrs.CONTENT_TYPE, ""),
                request.headers.get(hdrs.CONTENT_ENCODING, ""),
                self._runtime.config.max_body,
            )
        protocol: sse.Protocol = "anthropic" if is_anthropic(fact.path) else "openai"
        out = Outgoing(
            request.method, _target(request.rel_url, fact.path, plan, where), fact.path, CIMultiDict(request.headers),
            body, plan.model, fact.id, protocol,
        )  # fmt: skip
        try:
            return await self._forward(request, out, plan, fact, stream=found is not None and found.stream)
        finally:
            if body is not None:
                body.close()

    async def _find_model(self, request: web.Request, body: Body | None) -> Found:
        if body is None or body.size == 0:
            raise BadRequest("the body is empty; it must name a 'model'", param="body")
        return await bodies.find_model(
            body,
            request.headers.get(hdrs.CONTENT_TYPE, ""),
            request.headers.get(hdrs.CONTENT_ENCODING, ""),
            self._runtime.config.max_body,
        )

    def _plan(self, request: web.Request, fact: Facts, model: str | None, where: Source) -> Plan:
        plan = self._runtime.plan(request.method, fact.path, model, where)
        fact.group, fact.model = plan.group, plan.model
        return plan

    # -- the lease ----------------------------------------------------------------------------------------------

    def _hold(self, request: web.Request, plan: Plan, fact: Facts) -> "_Turn":
        return _Turn(self._runtime, request, plan, fact)

    # -- forward ------------------------------------------------------------------------------------------------

    async def _forward(
        self, request: web.Request, out: Outgoing, plan: Plan, fact: Facts, *, stream: bool
    ) -> web.StreamResponse:
        assert plan.upstream is not None
        runtime = self._runtime
        upstream = runtime.upstreams[plan.upstream]
        client = ClientStream(request)
        keep_alive = self._keep_alive(client, plan, out, stream=stream)
        try:
            async with keep_alive, self._hold(request, plan, fact) as hold:
                opened = _on_first_byte(fact, hold)
                try:
                    with fact.trace.upstream(out.headers, {"llama_lease.upstream": upstream.name}):
                        await upstream.exchange(out, client, keep_alive, opened)
                finally:
                    runtime.ticket_log.answered(fact.id, client.sent)
            return await client.finish()
        except ProxyError as error:
            if not client.started:
                raise
            await client.fail(error, out.protocol)
            fact.failed = error
            return client.response
        finally:
            client.close()
            self._count_beats(keep_alive)

    def _keep_alive(self, client: ClientStream, plan: Plan, out: Outgoing, *, stream: bool) -> KeepAlive:
        """What a client gets to read while it waits; by default nothing but for event streams."""
        kind: sse.BeatKind = "off"
        group = self._runtime.config.groups.get(plan.group)
        if group is not None and plan.mode is not None and out.method == "POST":
            if stream and group.heartbeat != "off":
                kind = "comment"
                if out.protocol == "anthropic":
                    kind = "ping"
                elif group.heartbeat == "chunk" and out.path.endswith("/chat/completions"):
                    kind = "chunk"
            elif not stream and group.pad_json and out.path.startswith("/v1/"):
                kind = "space"
        if kind == "off":
            return KeepAlive(client, kind, grace=0, interval=0)
        out.headers["Accept-Encoding"] = "identity"  # our own bytes may go before the answer's
        return self._beats(client, kind, plan)

    def _beats(self, client: ClientStream, kind: sse.BeatKind, plan: Plan) -> KeepAlive:
        """A keep-alive in the rhythm of the plan's lease."""
        lease = self._runtime.lease_section(plan)
        return KeepAlive(client, kind, grace=lease.heartbeat, interval=lease.heartbeat_interval, model=plan.model)

    async def _websocket(self, request: web.Request, fact: Facts) -> web.StreamResponse:
        self._check_origin(request)
        model, where = request.query.get("model"), source(request.method, fact.path)
        if where is Source.NOWHERE and model:
            where = Source.QUERY
        plan = self._plan(request, fact, model, where)
        if plan.upstream is None:
            raise BadRequest(f"the model '{plan.model}' has no websocket", param="model")
        upstream = self._runtime.upstreams[plan.upstream]
        target = _target(request.rel_url, fact.path, plan, where)
        try:
            async with self._hold(request, plan, fact) as hold:
                answered = functools.partial(self._runtime.ticket_log.answered, fact.id)
                return await websocket.relay(request, upstream, target, fact.id, hold, answered)
        except ProxyError as error:
            client: web.WebSocketResponse | None = request.get(websocket.ACCEPTED)
            if client is None:
                raise
            await websocket.fail(client, error)
            fact.failed = error
            return client

    def _check_origin(self, request: web.Request) -> None:
        """CORS does not hold for websockets: a browser opens one for any page, and lets the page read it."""
        origin = request.headers.get(hdrs.ORIGIN, "")
        own = origin.partition("://")[2] == request.headers.get(hdrs.HOST, "")
        if origin and not own and not cors.allows(origin, self._runtime.config.cors):
            raise Forbidden(
                f"pages of {origin} may not open a websocket here; add it to cors.origins in the configuration",
                param="Origin",
                code="origin_not_allowed",
            )

    # -- speech -------------------------------------------------------------------------------------------------

    async def _local(self, request: web.Request, body: Body | None, plan: Plan, fact: Facts) -> web.StreamResponse:
        """A request for a model that lives in this process."""
        assert plan.backend is not None
        if fact.path != "/v1/audio/speech" or body is None:
            raise BadRequest(f"the model '{plan.model}' speaks: it answers POST /v1/audio/speech only", param="model")
        encoding = request.headers.get(hdrs.CONTENT_ENCODING, "")
        plain = bodies.inflate(body.content(), encoding, self._runtime.config.max_body)
        settings = self._runtime.speech_settings
        speech = parse(plain, settings)
        body.close()
        backend = self._runtime.backend(plan.backend)
        stream = SpeechStream(request, speech, backend, settings, listener=self._runtime.metrics)
        async with stream:
            return await self._speak(request, speech, stream, plan, fact)
        return stream.response  # it broke off, and the stream has ended it

    async def _speak(
        self, request: web.Request, speech: SpeechRequest, stream: SpeechStream, plan: Plan, fact: Facts
    ) -> web.StreamResponse:
        client = ClientStream(request)
        kind: sse.BeatKind = "comment" if speech.stream_format == "sse" else "off"
        keep_alive = self._beats(client, kind, plan)
        try:
            async with keep_alive, self._hold(request, plan, fact) as hold:
                await keep_alive.stop()
                try:
                    with fact.trace.speech({"llama_lease.backend": plan.backend or ""}):
                        await stream.produce(_on_first_byte(fact, hold), client.response if client.started else None)
                finally:
                    self._runtime.ticket_log.answered(fact.id, stream.made)
        except ProxyError as error:
            if stream.began or not client.started:
                raise
            await client.fail(error, "openai")
            fact.failed = error
            return client.response
        finally:
            self._count_beats(keep_alive)
        response = await stream.finish()
        fact.failed = stream.error
        if stream.outcome == "client":
            raise ClientGone
        return response

    def _count_beats(self, keep_alive: KeepAlive) -> None:
        for _ in range(keep_alive.beats):
            self._runtime.metrics.heartbeat(keep_alive.kind)


class _Turn:
    """The lease of a plan as a context manager, with what is known about it written down; None for what takes none."""

    def __init__(self, runtime: Runtime, request: web.Request, plan: Plan, fact: Facts) -> None:
        self._runtime, self._request, self._plan, self._fact = runtime, request, plan, fact
        self._hold: Hold | None = None

    async def __aenter__(self) -> Hold | None:
        plan, fact = self._plan, self._fact
        await self._runtime.before_lease(plan)
        if plan.mode is not None:
            hold = self._runtime.hold(plan, fact.id, max_wait(self._request))
            self._runtime.requests[fact.id] = asyncio.current_task()
            try:
                with fact.trace.queue({"llama_lease.mode": str(plan.mode)}):
                    await hold.__aenter__()
                    self._hold = hold
            except BaseException as error:
                await self.__aexit__(type(error), error, error.__traceback__)
                raise
            fact.waited = hold.waited
            fact.headers["Server-Timing"] = f"lease;dur={hold.waited * 1000:.1f}"
        fact.phase = "upstream"
        return self._hold

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._hold is not None:
            await self._hold.__aexit__(kind, error, traceback)


def _on_first_byte(fact: Facts, hold: Hold | None) -> Callable[[], None]:
    """What to call when the answer begins: made at the grant."""
    granted = time.monotonic()

    def opened() -> None:
        fact.phase = "streaming"
        fact.first_byte = time.monotonic() - granted
        if hold is not None:
            hold.opened()

    return opened


def is_anthropic(path: str) -> bool:
    """Whether a normalised path speaks Anthropic's protocol."""
    return _ANTHROPIC.fullmatch(path) is not None


def max_wait(request: web.BaseRequest) -> float | None:
    """The X-Max-Wait header, in seconds; None without one. Raises BadRequest."""
    value = request.headers.get("X-Max-Wait")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise BadRequest(f"X-Max-Wait must be a number of seconds, not {value!r}", param="X-Max-Wait")
    return seconds


def _target(url: URL, path: str, plan: Plan, where: Source) -> str:
    """Path and query for the upstream: the normalised path, the query as it came, in both the model's own name.

    Where the path may be a page's, its last slash stays: a swapper redirects /ui to /ui/, without end otherwise.
    """
    if where is Source.QUERY and url.query.get("model") != plan.model:
        url = url.update_query(model=plan.model)
    elif where is Source.UNLOAD and plan.model != ALL_MODELS:
        path = "/api/models/unload/" + quote(plan.model)
    elif where in (Source.NOWHERE, Source.PATH, Source.FIXED) and url.raw_path.endswith("/") and path != "/":
        path += "/"
    return f"{path}?{url.raw_query_string}" if url.raw_query_string else path
