"""A small application around SpeechStream, the way the proxy's handler calls it, with a lock for a lease."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from backends.api import SpeechBackend
from proxy.errors import ProxyError
from proxy.speech import SpeechSettings, SpeechStream, parse


@dataclass(eq=False)
class SpeechApp:
    """What the tests look at: who holds the lock, the streams so far, what the listener heard."""

    backend: SpeechBackend
    settings: SpeechSettings = field(default_factory=SpeechSettings)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    streams: list[SpeechStream] = field(default_factory=list)
    opened: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    produced: asyncio.Event = field(default_factory=asyncio.Event)
    done: list[tuple[str, float, int, int]] = field(default_factory=list)
    prepare_first: bool = False

    def application(self) -> web.Application:
        app = web.Application(middlewares=[_errors])
        app.router.add_post("/v1/audio/speech", self.speak)
        return app

    async def speak(self, request: web.Request) -> web.StreamResponse:
        speech = parse(await request.read(), self.settings)
        try:
            async with SpeechStream(request, speech, self.backend, self.settings, listener=self) as stream:
                self.streams.append(stream)
                async with self.hold():
                    await stream.produce(self._open, await self._waiting(request))
                self.produced.set()
                return await stream.finish()
            return stream.response
        finally:
            self.ended.set()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        async with self.lock:
            yield

    async def _waiting(self, request: web.Request) -> web.StreamResponse | None:
        if not self.prepare_first:
            return None
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": waiting\n")
        return response

    def _open(self) -> None:
        self.opened += 1

    def speech_first_audio(self, backend: str, seconds: float) -> None:
        assert seconds >= 0

    def speech_done(
        self, backend: str, audio_seconds: float, synthesis_seconds: float, tokens: int, characters: int
    ) -> None:
        self.done.append((backend, audio_seconds, tokens, characters))


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
    except ProxyError as error:
        return web.json_response(error.body(), status=error.status, headers=error.headers)
    return response
