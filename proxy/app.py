"""The composition root: routes, middleware, start and stop. Everything is built here and handed down."""

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable, Iterator
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict

from proxy import auth, cors, status
from proxy.classify import has_dots, normalise
from proxy.config import Config
from proxy.errors import BadRequest, BodyTooLarge, MethodNotAllowed, ProxyError
from proxy.facts import FACTS, Facts
from proxy.handler import Handler, is_anthropic
from proxy.job_routes import JobRoutes
from proxy.jobs import Jobs
from proxy.places import RuntimePlaces
from proxy.relay import ClientGone
from proxy.runtime import ROUTES, Runtime, data_dir
from proxy.voices import Voices

logger = logging.getLogger(__name__)

RUNTIME = web.AppKey("runtime", Runtime)

_Endpoint = Callable[[web.Request], Awaitable[web.StreamResponse]]
_REQUEST_ID = re.compile(r"(?!(?:events|trace|ui)$)[A-Za-z0-9._:/+=-]{1,128}")  # what `DELETE /lease/{id}` can name


def build_app(config: Config) -> web.Application:
    """The whole server for one configuration; `app[RUNTIME].apply(other)` changes it while it runs.

    Serve it with `server_options`. Raises ConfigError.
    """
    runtime = Runtime(config)
    app = web.Application(middlewares=[_middleware(runtime)])
    app[RUNTIME] = runtime
    app.on_response_prepare.append(_add_headers)
    app.on_shutdown.append(_end_feed)
    app.cleanup_ctx.append(_running)
    handler = Handler(runtime)
    _add_own_routes(app, [*status.routes(runtime), *_speech_routes(app, runtime, handler)])
    for path in ROUTES:  # looked up by name; everything else is found by the catch-all
        app.router.add_route("*", path, handler.handle, expect_handler=_expect)
    app.router.add_route("*", "/{path:.*}", handler.handle, expect_handler=_expect)
    return app


def server_options() -> dict[str, Any]:
    """What `web.AppRunner` needs to keep this program's promises; `connections.listen` lets clients in."""
    return {
        "handler_cancellation": True,  # else a client that has gone keeps its place in the queue
        "auto_decompress": False,  # a body goes on as it came, and its header stays true
        "max_line_size": 1 << 16,
        "max_field_size": 1 << 16,
        "access_log": None,
        "logger": _http_logger(),
    }


def _http_logger() -> logging.Logger:
    """What aiohttp says about connections. What is not HTTP is no fault of ours: one line, and no traceback."""
    http = logging.getLogger("proxy.http")
    http.addFilter(_shorten)
    return http


def _shorten(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "refused what is not HTTP: %s", (error.message.partition("\n")[0],)
        record.exc_info = None
    return True


async def _end_feed(app: web.Application) -> None:
    """Readers of the feed never leave by themselves, and would hold up the server's end."""
    app[RUNTIME].feed.close()


async def _running(app: web.Application) -> AsyncIterator[None]:
    await app[RUNTIME].start()
    yield
    await app[RUNTIME].stop()


def _speech_routes(app: web.Application, runtime: Runtime, handler: Handler) -> Iterator[tuple[str, str, _Endpoint]]:
    """Voices and speech jobs; the rest of speech is a request like any other."""
    places = RuntimePlaces(runtime)
    voices = Voices(
        places,
        handler.handle,
        handler.handle_read,
        max_upload=lambda: runtime.config.speech.max_upload,
        max_body=lambda: runtime.config.max_body,
    )
    jobs = Jobs(
        data_dir(runtime.config) / "jobs",
        places,
        lambda: runtime.job_settings,
        lambda: runtime.speech_settings,
        listener=runtime.metrics,
    )

    async def running(_: web.Application) -> AsyncIterator[None]:
        await jobs.start()
        yield
        await voices.close()

    async def stop(_: web.Application) -> None:
        await jobs.stop()  # those who listen to a job would hold up the server's end

    app.cleanup_ctx.append(running)
    app.on_shutdown.append(stop)
    yield from voices.routes()
    yield from JobRoutes(jobs, lambda: runtime.speech_settings, lambda: runtime.config.max_body).routes()


def _add_own_routes(app: web.Application, routes: Iterable[tuple[str, str, _Endpoint]]) -> None:
    """Register (methods, path, endpoint) with doubled and trailing slashes allowed, and 405 for other methods."""
    allowed: dict[str, list[str]] = {}
    for methods, path, endpoint in routes:
        for variant in dict.fromkeys((path, _flexible(path))):
            for method in methods.split():
                app.router.add_route(method, variant, endpoint, expect_handler=_expect)
        allowed.setdefault(path, []).extend(methods.split())
    for path, answered in allowed.items():
        refuse = _refuse_method(path, answered)
        for variant in dict.fromkeys((path, _flexible(path))):
            app.router.add_route("*", variant, refuse, expect_handler=_expect)


def _flexible(path: str) -> str:
    first, *rest = path.strip("/").split("/")
    return f"/{{_:/*}}{first}" + "".join(f"{{_{index}:/+}}{part}" for index, part in enumerate(rest)) + "{_end:/*}"


def _refuse_method(path: str, methods: list[str]) -> _Endpoint:
    async def refuse(request: web.Request) -> web.StreamResponse:
        allowed = ", ".join(sorted(methods))
        raise MethodNotAllowed(f"{path} answers {allowed}, not {request.method}", headers={"Allow": allowed})

    return refuse


def _middleware(runtime: Runtime) -> Any:
    """Outermost: who calls, what it cost, and every error as a response. Errors become responses here alone."""

    live: set[str] = set()

    @web.middleware
    async def middleware(request: web.Request, handler: _Endpoint) -> web.StreamResponse:
        started = time.monotonic()
        path = normalise(request.rel_url.raw_path)
        name = f"{request.method} {path if path in ROUTES else 'other'}"
        with runtime.tracing.request_span(request.headers, name) as trace:
            fact = Facts(_request_id(request, live), path, trace)
            request[FACTS] = fact
            live.add(fact.id)
            code = 499
            try:
                response = await _answer(request, handler, runtime, fact)
                code = fact.failed.status if fact.failed is not None else response.status
                return response
            except ClientGone:
                runtime.metrics.disconnected(fact.phase)
                return web.Response(status=499)  # nobody reads it: the connection is closed
            except asyncio.CancelledError:
                if not runtime.stopping and not fact.watches:
                    runtime.metrics.disconnected(fact.phase)
                raise
            finally:
                live.discard(fact.id)
                runtime.requests.pop(fact.id, None)
                trace.set({"http.response.status_code": code})
                if not fact.watches:
                    seconds = time.monotonic() - started
                    runtime.metrics.request_finished(path, fact.group, code, seconds, fact.first_byte)

    return middleware


async def _answer(request: web.Request, endpoint: _Endpoint, runtime: Runtime, fact: Facts) -> web.StreamResponse:
    try:
        if has_dots(fact.path):  # every client resolves them before it asks
            raise BadRequest("the path must not have the segments '.' and '..'", param="path")
        fact.owner = auth.admit(request, runtime.config, fact.path)
        _check_length(request, runtime.config.max_body)
        if request.method == "OPTIONS":
            return web.Response(status=204, headers=cors.preflight_headers(request.headers))
        return await endpoint(request)
    except ProxyError as error:
        return _error_response(error, request, fact.path)
    except web.HTTPException as error:
        refused = ProxyError(error.text or error.reason)
        refused.status = error.status
        refused.type = "invalid_request_error" if error.status < 500 else refused.type
        return _error_response(refused, request, fact.path)
    except (aiohttp.ClientPayloadError, web.RequestPayloadError) as error:
        return _error_response(BadRequest(f"the body cannot be read: {error}", param="body"), request, fact.path)
    except (ClientGone, asyncio.CancelledError):
        raise
    except ConnectionError as error:
        raise ClientGone from error
    except Exception:
        logger.exception("a fault of this program: %s %s", request.method, fact.path)
        fault = ProxyError("a fault of this program; its log has more", code="internal_error")
        return _error_response(fault, request, fact.path)


def _error_response(error: ProxyError, request: web.Request, path: str) -> web.Response:
    body = error.anthropic_body() if is_anthropic(path) else error.body()
    response = web.json_response(body, status=error.status, headers=CIMultiDict(error.headers))
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if not request.content.is_eof():
        response.force_close()  # the rest of the body is still on its way
    return response


def _check_length(request: web.Request, limit: int) -> None:
    if (request.content_length or 0) > limit:
        raise BodyTooLarge(f"the body is over max_body, {limit} bytes")


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """On every response, at the last moment before its head is sent."""
    runtime = request.app[RUNTIME]
    cors.add_headers(request.headers, response.headers, runtime.config.cors)
    if (fact := request.get(FACTS)) is not None:
        response.headers["X-Request-Id"] = fact.id
        response.headers.update(fact.headers)


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """`Expect: 100-continue` asks before it sends a body: check who asks, and how long the body is, before saying yes.

    Saying no is the middleware's: it refuses the request for the same reasons.
    """
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= (1, 1):
        config = request.app[RUNTIME].config
        with contextlib.suppress(ProxyError, ConnectionError):
            auth.admit(request, config, normalise(request.rel_url.raw_path))
            _check_length(request, config.max_body)
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return None


def _request_id(request: web.BaseRequest, live: Container[str]) -> str:
    """The client's own id where it is one, and no other request under way has it: `DELETE /lease/{id}` means one."""
    given = request.headers.get("X-Request-Id", "")
    return given if given and given not in live and _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
