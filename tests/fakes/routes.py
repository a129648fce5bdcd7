"""The HTTP face of FakeSwapper: llama-swap's paths."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.fakes.answers import JSON, SSE, Answer, answer, event
from tests.fakes.gates import send_past
from tests.fakes.scheduler import SwapperError
from tests.fakes.wire import form_fields, json_fields

if TYPE_CHECKING:
    from tests.fakes.swapper import FakeSwapper, Use

TWINS = ("/chat/completions", "/responses", "/completions", "/messages", "/messages/count_tokens", "/embeddings",
         "/rerank", "/reranking")  # fmt: skip
JSON_POSTS = frozenset({
    *(f"/v1{path}" for path in TWINS), *(f"/v{path}" for path in TWINS), "/rerank", "/reranking", "/infill",
    "/completion", "/v1/audio/speech", "/v1/audio/voices", "/v1/images/generations", "/sdapi/v1/txt2img",
    "/sdapi/v1/img2img", "/audioapi/v1/tasks/run",
})  # fmt: skip
FORM_POSTS = frozenset({"/v1/audio/transcriptions", "/v1/images/edits"})
QUERY_GETS = frozenset({"/v1/audio/voices", "/sdapi/v1/loras", "/props"})


def build_app(fake: "FakeSwapper") -> web.Application:
    """Every path of llama-swap on one application."""
    app = web.Application(client_max_size=1 << 30)
    handlers = _Handlers(fake)
    app.router.add_get("/v1/models", handlers.models)
    app.router.add_get("/models", handlers.models)
    app.router.add_get("/running", handlers.running)
    app.router.add_get("/api/events", handlers.event_stream)
    app.router.add_get("/unload", handlers.unload)
    app.router.add_post("/api/models/unload", handlers.unload)
    app.router.add_post("/api/models/unload/{model:.+}", handlers.unload)
    for path in ("/", "/health", "/logs", "/logs/stream", "/metrics", "/favicon.ico", "/ui/{rest:.*}"):
        app.router.add_get(path, handlers.plain)
    app.router.add_route("*", "/{path:.*}", handlers.model_request)
    return app


def error_body(error: SwapperError) -> bytes:
    """The OpenAI error object."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    body = {"error": {"message": error.message, "type": kind, "param": None, "code": None}}
    return json.dumps(body).encode()


class _Handlers:
    def __init__(self, fake: "FakeSwapper") -> None:
        self.fake = fake

    async def models(self, request: web.Request) -> web.Response:
        self._record(request, b"", None)
        data = []
        for name, model in self.fake.models.items():
            status = {"value": "loaded" if name in self.fake.resident else "unloaded"}
            meta = {"llamaswap": {"aliases": list(model.aliases), "type": "model"}}
            data.append({"id": name, "object": "model", "created": 0, "owned_by": "fake", "meta": meta,
                         "status": status})  # fmt: skip
            for alias in (*model.aliases, *model.parameter_ids):
                data.append({"id": alias, "object": "model", "created": 0, "owned_by": "fake",
                             "meta": {"llamaswap": {"type": "alias"}}, "status": status})  # fmt: skip
        return web.json_response({"object": "list", "data": data})

    async def running(self, request: web.Request) -> web.Response:
        self._record(request, b"", None)
        states = dict.fromkeys(self.fake.stopping, "stopping")
        states |= dict.fromkeys(self.fake.scheduler.swaps, "starting") | dict.fromkeys(self.fake.resident, "ready")
        return web.json_response({"running": [{"model": m, "state": s, "ttl": 0} for m, s in sorted(states.items())]})

    async def event_stream(self, request: web.Request) -> web.StreamResponse:
        self._record(request, b"", None)
        response = web.StreamResponse(headers={"Content-Type": SSE, "X-Accel-Buffering": "no"})
        await response.prepare(request)
        told = 0
        while True:
            for happened in self.fake.events[told:]:
                await response.write(event({"type": happened.kind, "data": happened.model}, "message"))
                told += 1
            self.fake.changed.clear()
            await self.fake.changed.wait()

    async def unload(self, request: web.Request) -> web.Response:
        wanted = request.match_info.get("model")
        model = self.fake.names.get(wanted) if wanted else None
        self._record(request, await request.read(), model)
        if wanted and model is None:
            return self._error(SwapperError(404, f"model {wanted!r} not found"))
        self.fake.unload({model} if model else set(self.fake.models))
        return web.Response(text="OK")

    async def plain(self, request: web.Request) -> web.Response:
        self._record(request, b"", None)
        return web.Response(text="OK")

    async def model_request(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        try:
            wanted, route, fields = self._find_model(request, body)
        except SwapperError as error:
            self._record(request, body, None)
            return self._error(error)
        model = self.fake.names.get(wanted)
        number = self._record(request, body, model)
        if model is None:
            return self._error(SwapperError(404, f"model {wanted!r} not found"))
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await _Reply(self.fake, request, model, number).websocket()
        pieces = int(request.headers.get("X-Fake-Events", self.fake.models[model].events))
        return await _Reply(self.fake, request, model, number).send(answer(route, model, fields, pieces))

    def _find_model(self, request: web.Request, body: bytes) -> tuple[str, str, dict[str, Any]]:
        """(model as asked for, route without its version, fields of the body). Raises SwapperError."""
        path, method = request.path, request.method
        if path.startswith("/upstream/"):
            rest = path.removeprefix("/upstream/")
            fits = [name for name in self.fake.names if rest == name or rest.startswith(f"{name}/")]
            if not fits:
                raise SwapperError(404, f"no model in {path}")
            name = max(fits, key=len)
            return name, _unversioned(rest[len(name) :]), json_fields(body, strict=False)
        if path.startswith("/comfyui/"):
            return "comfyui_auto", path, {}
        if method == "POST" and path in JSON_POSTS:
            fields = json_fields(body)
        elif method == "POST" and path in FORM_POSTS:
            fields = form_fields(request.headers.get("Content-Type", ""), body)
        elif method == "GET" and path in QUERY_GETS:
            fields = dict(request.query)
        else:
            raise SwapperError(404, f"no such path: {method} {path}")
        wanted = fields.get("model")
        if not isinstance(wanted, str) or not wanted:
            raise SwapperError(400, "missing or invalid 'model'")
        return wanted, _unversioned(path), fields

    def _record(self, request: web.Request, body: bytes, model: str | None) -> int:
        headers = request.headers.copy()
        return self.fake.received(request.method, request.raw_path, headers, body, model)

    def _error(self, error: SwapperError) -> web.Response:
        return web.Response(status=error.status, body=error_body(error), content_type=JSON)


class _Reply:
    """One request's life at the model that it asks for."""

    def __init__(self, fake: "FakeSwapper", request: web.Request, model: str, number: int) -> None:
        self.fake = fake
        self.request = request
        self.model = model
        self.number = number
        self.response: web.StreamResponse | None = None
        self.started = False

    async def send(self, what: Answer) -> web.StreamResponse:
        fake, model = self.fake, self.model
        if fake.loading_state and what.content_type == SSE and model not in fake.resident:
            await self._open(what)
            loading = {"choices": [{"index": 0, "delta": {"reasoning_content": "loading"}, "finish_reason": None}]}
            await self._write(event({"object": "chat.completion.chunk", "model": model, **loading}))
        try:
            use = await fake.acquire(model, self.number)
        except SwapperError as error:
            return await self._refuse(error)
        try:
            if slot := fake.slot(model):
                async with slot:
                    await self._work(what)
            else:
                await self._work(what)
            fake.note("done", model, self.number)
        except asyncio.CancelledError:
            if not use.killed:
                fake.note("gone", model, self.number)
                raise
            return await self._killed(use)
        except ConnectionError:
            fake.note("gone", model, self.number)
            return self.response or web.Response(status=499)  # nobody reads it, and it is no fault of the server's
        finally:
            fake.scheduler.leave(use.job)
        assert self.response is not None
        await self.response.write_eof()
        return self.response

    async def websocket(self) -> web.WebSocketResponse:
        """Says back what it hears; uses the model until it is closed."""
        socket = web.WebSocketResponse()
        await socket.prepare(self.request)
        use = await self.fake.acquire(self.model, self.number)
        try:
            async for message in socket:
                if message.type == web.WSMsgType.TEXT:
                    await socket.send_str(f"{self.model}: {message.data}")
                elif message.type == web.WSMsgType.BINARY:
                    await socket.send_bytes(message.data)
        except asyncio.CancelledError:
            if not use.killed:
                raise
            use.task.uncancel()
        finally:
            self.fake.note("done", self.model, self.number)
            self.fake.scheduler.leave(use.job)
        return socket

    async def _work(self, what: Answer) -> None:
        fake = self.fake
        work = float(self.request.headers.get("X-Fake-Work", fake.models[self.model].work))
        share = work / len(what.pieces)
        gate = fake.gate_for(self.model)
        if gate and gate.after is None:
            await gate()
        sent = 0
        for piece in what.pieces:
            await fake.sleep(share)
            await self._open(what)
            sent = await send_past(gate, sent, piece, self._write)

    async def _open(self, what: Answer) -> None:
        if self.response is None:
            self.response = web.StreamResponse(headers={"Content-Type": what.content_type})
            if what.content_type == SSE:
                self.response.headers["X-Accel-Buffering"] = "no"
            if not what.streamed:
                self.response.content_length = len(what.body)
            await self.response.prepare(self.request)

    async def _write(self, piece: bytes) -> None:
        assert self.response is not None
        await self.response.write(piece)
        if not self.started:
            self.started = True
            self.fake.note("first_byte", self.model, self.number)

    async def _refuse(self, error: SwapperError) -> web.StreamResponse:
        if self.response is not None:  # the stream is open: llama-swap appends the error as raw JSON
            await self.response.write(error_body(error))
            await self.response.write_eof()
            return self.response
        headers = {"Retry-After": "1"} if error.status == 429 else {}
        return web.Response(status=error.status, body=error_body(error), content_type=JSON, headers=headers)

    async def _killed(self, use: "Use") -> web.StreamResponse:
        use.task.uncancel()
        if self.response is None:
            return await self._refuse(SwapperError(502, f"model {self.model!r} stopped"))
        if self.fake.cuts:
            assert self.request.transport is not None
            self.request.transport.abort()
        else:
            await self.response.write_eof()
        return self.response


def _unversioned(path: str) -> str:
    for version in ("/v1/", "/v/"):
        if path.startswith(version):
            return path[len(version) - 1 :]
    return path
