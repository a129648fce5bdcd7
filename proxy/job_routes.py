"""The routes of speech jobs: POST, GET and DELETE under /v1/audio/speech/jobs. Nobody sees other people's jobs."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from aiohttp import web

from backends.audio import content_type
from proxy import facts
from proxy.body import Body
from proxy.errors import BadRequest, ProxyError
from proxy.job_audio import follow, whole_wav
from proxy.job_store import Job
from proxy.jobs import Jobs
from proxy.relay import cut
from proxy.speech_request import SpeechSettings, parse, read_object

Endpoint = Callable[[web.Request], Awaitable[web.StreamResponse]]

_PATH = "/v1/audio/speech/jobs"
_UNHURRIED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class JobRoutes:
    """The endpoints. `speech_settings` and `max_body` are asked for at each request, as they may change."""

    def __init__(
        self,
        jobs: Jobs,
        speech_settings: Callable[[], SpeechSettings],
        max_body: Callable[[], int],
    ) -> None:
        self._jobs = jobs
        self._speech_settings = speech_settings
        self._max_body = max_body

    def routes(self) -> Iterator[tuple[str, str, Endpoint]]:
        """(methods, path, endpoint)."""
        yield "POST", _PATH, self.submit
        yield "GET", _PATH, self.list
        yield "GET", _PATH + "/{id}", self.show
        yield "DELETE", _PATH + "/{id}", self.delete
        yield "GET", _PATH + "/{id}/audio", self.audio
        yield "GET", _PATH + "/{id}/events", self.events

    async def submit(self, request: web.Request) -> web.StreamResponse:
        """The body of POST /v1/audio/speech -> 202 and the job. `stream_format` has no meaning here."""
        body = await Body.read(request.content, self._max_body())
        try:
            data = body.content()
        finally:
            body.close()
        speech = parse(data, self._speech_settings())
        job = await self._jobs.submit(speech, read_object(data), facts.of(request).owner)
        return web.json_response(self._shown(job), status=202, headers={"Location": f"{_PATH}/{job.id}"})

    async def list(self, request: web.Request) -> web.StreamResponse:
        """The caller's jobs, the newest first; `limit` (1 to 100, default 20) and `after` (a job's id) page through."""
        limit = _limit(request.query.get("limit"))
        owner = facts.of(request).owner
        before = None
        if after := request.query.get("after"):
            before = (await self._jobs.find(after, owner)).created
        jobs = await self._jobs.all(owner, limit=limit + 1, before=before)
        shown = [self._shown(job) for job in jobs[:limit]]
        return web.json_response({"object": "list", "data": shown, "has_more": len(jobs) > limit})

    async def show(self, request: web.Request) -> web.StreamResponse:
        """One job."""
        return web.json_response(self._shown(await self._find(request)))

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """Cancel a job that is not over, and say how it ended; forget one that is."""
        job = await self._find(request)
        if job.over:
            await self._jobs.forget(job)
            return web.json_response({"id": job.id, "object": "audio.speech.job.deleted", "deleted": True})
        await self._jobs.cancel(job)
        return web.json_response(self._shown(job))

    async def audio(self, request: web.Request) -> web.StreamResponse:
        """What there is, and the rest as it is made. `partial=true`: what a job made that did not come to its end."""
        job = await self._find(request)
        path = await self._jobs.audio(job)
        partial = request.query.get("partial", "").lower() in ("1", "true", "yes")
        if job.over and job.status != "done" and not (partial and job.samples):
            raise _not_done(job)
        response = web.StreamResponse(headers={"Content-Type": content_type(job.spec.response_format)})
        data = follow(job, path, lambda: self._jobs.stopping)
        if job.status == "done" and job.spec.response_format == "wav":
            response.content_length, data = await whole_wav(job, path)
        else:
            response.headers.update(_UNHURRIED)
        async with aclosing(data) as pieces:
            async for piece in pieces:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(piece)
        if job.status == "done" or (partial and job.over and response.prepared):
            await response.write_eof()
        elif not response.prepared:
            raise _not_done(job)
        else:
            cut(request)
        return response

    async def events(self, request: web.Request) -> web.StreamResponse:
        """The job at once, then at each change, until it is over."""
        job = await self._find(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", **_UNHURRIED})
        await response.prepare(request)
        async for event in self._changes(job):
            await response.write(event)
        await response.write_eof()
        return response

    async def _changes(self, job: Job) -> AsyncIterator[bytes]:
        told: dict[str, Any] = {}
        while True:
            change = job.change
            shown = self._shown(job)
            if shown != told:
                told = shown
                kind = job.status if job.over else "updated"
                yield _event({"type": f"audio.speech.job.{kind}", "job": shown})
            if job.over or self._jobs.stopping:
                return
            try:
                async with asyncio.timeout(self._speech_settings().heartbeat):
                    await change.wait()
            except TimeoutError:
                yield b": working\n"

    async def _find(self, request: web.Request) -> Job:
        return await self._jobs.find(request.match_info["id"], facts.of(request).owner)

    def _shown(self, job: Job) -> dict[str, Any]:
        expires = self._jobs.expires(job)
        return {
            "id": job.id,
            "object": "audio.speech.job",
            "model": job.model,
            "status": job.status,
            "position": self._jobs.position(job),
            "created_at": int(job.created),
            "started_at": None if job.started is None else int(job.started),
            "ended_at": None if job.ended is None else int(job.ended),
            "expires_at": None if expires is None else int(expires),
            "response_format": job.spec.response_format,
            "progress": {
                "sentences_done": job.sentences,
                "sentences_total": len(job.spec.pieces),
                "audio_seconds": round(job.seconds, 3),
            },
            "usage": {
                "input_tokens": job.spec.input_tokens,
                "output_tokens": job.tokens,
                "total_tokens": job.spec.input_tokens + job.tokens,
            },
            "error": job.error,
        }


def _not_done(job: Job) -> ProxyError:
    if job.status == "failed" and job.error is not None:
        return ProxyError(f"the job failed: {job.error['message']}", code="job_failed")
    if job.status == "cancelled":
        return BadRequest("the job was cancelled; what it made is at ?partial=true", param="id", code="job_cancelled")
    return ProxyError("the server is stopping; the job goes on when it is back", code="shutting_down")


def _limit(value: str | None) -> int:
    if value is None:
        return 20
    if not value.isascii() or not value.isdecimal() or not 1 <= int(value) <= 100:
        raise BadRequest(f"limit must be a whole number from 1 to 100, not {value!r}", param="limit")
    return int(value)


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
