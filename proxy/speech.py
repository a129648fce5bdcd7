"""POST /v1/audio/speech on a backend of this process: HTTP on one side, a thread that speaks on the other.

    speech = parse(body, settings)                                  # 400s; no lease yet
    async with SpeechStream(request, speech, backend, settings) as stream:      # 400s: voice, nothing to say
        async with lease.hold(...) as hold:
            await stream.produce(hold.opened)                       # returns when the synthesis is over
        return await stream.finish()                                # returns when the client has everything

Three parties: the thread synthesises sentence by sentence, encodes, and puts bytes into a spool; the relay task
takes them out and writes them to the client; `produce` waits for the thread. So the first sentence is sent while
the second is made, and the lease ends with the synthesis however slowly the client reads.

Endings:
1. Everything was sent: `outcome` "done".
2. The synthesis failed before the response began: `produce` raises, the caller answers with an error object.
3. It failed later: what exists is sent, then (sse) an error event, then the connection is cut, so that no client
   takes it for the whole. `outcome` "error", `error` says why; nothing is raised.
4. The client went: the thread stops within a sentence or a decode step, `outcome` "client"; a cancellation that
   the server sends for it passes through after the thread has been joined.
5. The block inside `async with` failed after the response had begun (max_hold, say): like 3.
"""

import asyncio
import base64
import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from types import TracebackType
from typing import Any, Protocol, Self

from aiohttp import web

from backends.api import SpeechBackend, Utterance
from backends.audio import Encoder, content_type
from backends.errors import Cancelled
from backends.tempo import share_speed
from proxy import threads
from proxy.errors import BadRequest, ProxyError
from proxy.relay import cut
from proxy.speech_request import SpeechRequest, SpeechSettings, as_proxy_error, choose_voice, parse
from proxy.spool import Closed, Spool

__all__ = ["Script", "SpeechListener", "SpeechRequest", "SpeechSettings", "SpeechStream", "parse"]

logger = logging.getLogger(__name__)


class SpeechListener(Protocol):
    """Who counts: proxy.metrics has these."""

    def speech_first_audio(self, backend: str, seconds: float) -> None: ...
    def speech_done(
        self, backend: str, audio_seconds: float, synthesis_seconds: float, tokens: int, characters: int
    ) -> None: ...


class Script:
    """A request made ready for one backend: voice chosen, text cut, speed shared out. Touches no device.

    Made in a worker thread: a backend may read its tokenizer first, and to cut a whole book takes a moment.
    Raises BadRequest (param "voice" or "input") and ModelUnavailable.
    """

    def __init__(self, speech: SpeechRequest, backend: SpeechBackend, settings: SpeechSettings) -> None:
        try:
            self.voice = choose_voice(speech.voice, backend.voices(), settings)
            self.pieces = tuple(backend.split(speech.input))
            self.input_tokens = backend.count_tokens(speech.input)
        except Exception as error:
            raise as_proxy_error(error) from error
        if not self.pieces:
            raise BadRequest("input has nothing that can be spoken", param="input")
        self.instructions = speech.instructions
        self.native_speed, self.tempo = share_speed(speech.speed, backend.speed_range)

    def utterance(self, index: int) -> Utterance:
        """The piece of that number, as the backend takes it."""
        return Utterance(self.pieces[index], self.voice, self.instructions, self.native_speed)


class SpeechStream:
    """One answer, from the first sentence to the last byte; see the module's text for the order of calls."""

    def __init__(
        self,
        request: web.Request,
        speech: SpeechRequest,
        backend: SpeechBackend,
        settings: SpeechSettings,
        *,
        listener: SpeechListener | None = None,
    ) -> None:
        self.outcome = "done"
        self.error: ProxyError | None = None
        self.made = 0  # bytes of audio so far
        self._request = request
        self._speech = speech
        self._backend = backend
        self._settings = settings
        self._listener = listener
        self._response: web.StreamResponse | None = None
        self._began = False  # the response is under way: errors can no longer change its status
        self._complete = False  # the client was given everything: that it leaves now means nothing
        self._cancel = threading.Event()
        self._tokens = 0
        self._audio_seconds = 0.0

    async def __aenter__(self) -> Self:
        """Raises BadRequest and ModelUnavailable, before any lease."""
        self._script = await asyncio.to_thread(Script, self._speech, self._backend, self._settings)
        self._loop = asyncio.get_running_loop()
        self._spool = Spool(memory=self._settings.spool_memory, limit=self._settings.spool_limit)
        self._relay: asyncio.Task[None] | None = None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._cancel.set()
        handled = False
        if self._relay is not None and not self._relay.done():
            self._relay.cancel()
            await asyncio.wait({self._relay})
        self._spool.close()
        if isinstance(error, Exception) and self._began:
            await self._break_off(as_proxy_error(error))
            handled = True
        return handled

    @property
    def began(self) -> bool:
        """The response is under way: errors can no longer change its status."""
        return self._began

    @property
    def response(self) -> web.StreamResponse:
        """The response, once it exists."""
        assert self._response is not None
        return self._response

    async def produce(self, opened: Callable[[], None], response: web.StreamResponse | None = None) -> None:
        """Speak; call inside the lease. Returns when no thread of this request runs any more.

        `opened` is called once, when the first audio exists. `response`: an event stream that was prepared while
        the client waited; nobody else may write to it from now on. Raises ProxyError while `response` is not
        ours, see ending 2.
        """
        self._response = response
        started = time.monotonic()

        def first_audio() -> None:
            opened()
            if self._listener is not None:
                self._listener.speech_first_audio(self._backend.name, time.monotonic() - started)

        self._relay = asyncio.create_task(self._send())
        try:
            error = await threads.run(lambda: self._speak(first_audio), self._stop)
        except asyncio.CancelledError:
            if not self._complete:
                raise
            error = None
        if self._listener is not None:
            self._listener.speech_done(
                self._backend.name,
                self._audio_seconds,
                time.monotonic() - started,
                self._tokens,
                len(self._speech.input),
            )
        if error is not None and not self._began and self.outcome != "client":
            self._relay.cancel()
            raise error

    async def finish(self) -> web.StreamResponse:
        """Wait until the client has everything; call after the lease."""
        assert self._relay is not None
        try:
            await asyncio.wait({self._relay})
        except asyncio.CancelledError:
            if not self._complete:
                raise
        self._relay.result()
        return self.response

    # -- the thread ---------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        self._cancel.set()
        self._spool.close()

    def _speak(self, first_audio: Callable[[], None]) -> ProxyError | None:
        """Runs in the thread. The error is returned, and is the spool's ending, whatever it was."""
        failure: ProxyError | None = None
        try:
            self._synthesize(first_audio)
        except (Closed, Cancelled):
            pass  # the client went, or the block is being cancelled: who stopped us knows why
        except Exception as error:
            failure = as_proxy_error(error)
            logger.error("speech failed backend=%s: %s", self._backend.name, error, exc_info=failure.status == 500)
        self._spool.finish(failure)
        return failure

    def _synthesize(self, first_audio: Callable[[], None]) -> None:
        script = self._script
        encoder = Encoder(self._speech.response_format, self._backend.sample_rate, tempo=script.tempo)
        heard = False
        for index in range(len(script.pieces)):
            with closing(self._backend.synthesize(script.utterance(index), self._cancel)) as chunks:
                for chunk in chunks:
                    self._tokens += chunk.tokens
                    if chunk.samples.size and not heard:
                        heard = True
                        self._loop.call_soon_threadsafe(first_audio)
                    self._put(encoder.encode(chunk.samples))
                    self._audio_seconds = encoder.seconds
            if self._cancel.is_set():
                raise Cancelled
        if not heard:
            raise BadRequest("the voice has no sounds for this input", param="input")
        self._put(encoder.finish())
        self._audio_seconds = encoder.seconds

    def _put(self, data: bytes) -> None:
        self._spool.put(data)
        self.made += len(data)

    # -- the relay ----------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        """From the spool to the client, to its last byte. A client that has gone stops the thread."""
        try:
            while (data := await self._next()) is not None:
                response = await self._begin()
                async with asyncio.timeout(self._settings.stall):
                    await response.write(self._frame(data) if data else b": speaking\n")
            if self._spool.error is not None:
                if self._began:
                    await self._break_off(as_proxy_error(self._spool.error))
                return
            response = await self._begin()
            if self._speech.stream_format == "sse":
                await response.write(_event({"type": "speech.audio.done", "usage": self._usage()}))
            await response.write_eof()
            self._complete = True
        except (ConnectionError, TimeoutError):
            self.outcome = "client"
            self._stop()
            if self._request.transport is not None:
                self._request.transport.abort()
        except Closed:
            return  # who closed the spool ends the response

    async def _next(self) -> bytes | None:
        """Bytes, or None at the end; b"" when an event stream needs a comment, so that nobody times out."""
        if self._speech.stream_format != "sse":
            return await self._spool.take()
        try:
            async with asyncio.timeout(self._settings.heartbeat):
                return await self._spool.take()
        except TimeoutError:
            return b""

    async def _begin(self) -> web.StreamResponse:
        self._began = True
        if self._response is None:
            self._response = web.StreamResponse(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
            sse = self._speech.stream_format == "sse"
            kind = "text/event-stream" if sse else content_type(self._speech.response_format)
            self._response.headers["Content-Type"] = kind
            await self._response.prepare(self._request)
        return self._response

    def _frame(self, data: bytes) -> bytes:
        if self._speech.stream_format != "sse":
            return data
        return _event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode("ascii")})

    def _usage(self) -> dict[str, int]:
        given, made = self._script.input_tokens, self._tokens
        return {"input_tokens": given, "output_tokens": made, "total_tokens": given + made}

    async def _break_off(self, error: ProxyError) -> None:
        """End a response that has begun so that the client notices."""
        self.outcome, self.error = "error", error
        if self._response is not None and self._speech.stream_format == "sse":
            try:
                await self._response.write(_event(error.body()))
            except ConnectionError:
                self.outcome = "client"
        cut(self._request)


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode("utf-8") + b"\n\n"
