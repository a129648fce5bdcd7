"""Speech jobs: long texts that are spoken a slice at a time, and survive the end of the process.

Each unfinished job is a task of its own that stands in the lease's line like any request: it takes the lease for one
slice (`slice` seconds of audio, at least one sentence), then stands in line again, so that the chat gets its turn.
`running` is set while the job holds the lease, and only then; in between it is `queued`.

After every sentence the samples and then the row are written, so a killed process loses at most the sentence in the
works. What a job has made is sent from its file, and follows what is still being made.
"""

import asyncio
import logging
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from backends.api import SpeechBackend, Utterance
from backends.audio import OUT_RATE, to_pcm
from backends.decode import read_audio
from backends.errors import Cancelled, InvalidInput
from backends.tempo import Reshaper
from backends.text import sentences
from proxy import threads
from proxy.errors import (
    BadRequest,
    LeaseCancelled,
    LeaseClosed,
    ModelUnavailable,
    NotFound,
    QueueFull,
    UpstreamError,
    WaitTooLong,
)
from proxy.job_store import Job, JobSpec, JobStore, Status, StoreInUse, database_path
from proxy.places import Places, SpeechModel
from proxy.speech import Script, SpeechListener
from proxy.speech_request import JobSettings, SpeechRequest, SpeechSettings, as_proxy_error

logger = logging.getLogger(__name__)

# For a model at an upstream the length of audio is not known before: a usual pace.
_CHARACTERS_PER_SECOND = 15.0
_LONGEST_ANSWER = 3600.0  # seconds of audio in one answer of an upstream
_PAUSE = 1.0  # seconds before a job whose wait was too long stands in line again
_SWEEP = 60.0  # seconds between two looks for expired jobs


class Jobs:
    """All jobs of one folder. `start` inside the event loop, `stop` before what `places` needs goes away."""

    def __init__(
        self,
        folder: Path,
        places: Places,
        settings: Callable[[], JobSettings],
        speech_settings: Callable[[], SpeechSettings],
        *,
        listener: SpeechListener | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Settings are asked for when they are needed, as they may change. `clock`: Unix time."""
        self._folder = folder
        self._places = places
        self._settings = settings
        self._speech_settings = speech_settings
        self._listener = listener
        self._clock = clock
        self._store: JobStore | None = None
        self._opening = asyncio.Lock()
        self._live: dict[str, Job] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelling: set[str] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self.stopping = False

    async def start(self) -> None:
        """Go on with the jobs that a former process left. A folder without jobs is not touched."""
        if not await asyncio.to_thread(database_path(self._folder).exists):
            return
        try:
            await self.store()
        except ModelUnavailable as error:
            logger.error("speech jobs are not available: %s", error)

    async def stop(self) -> None:
        """Stop at the last finished sentence; the next process goes on from there."""
        self.stopping = True
        tasks = [*self._tasks.values(), *([self._sweeper] if self._sweeper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._store is not None:
            await self._store.close()
            self._store = None

    async def store(self) -> JobStore:
        """The store, opened at the first call. Raises ModelUnavailable."""
        if self.stopping:
            raise LeaseClosed
        async with self._opening:
            if self._store is None:
                try:
                    store = await JobStore.open(self._folder)
                except (OSError, StoreInUse) as error:
                    raise ModelUnavailable(f"speech jobs cannot be kept: {error}", code="jobs_unavailable") from error
                for job in await store.unfinished():
                    job.status = "queued"
                    self._begin(job)
                self._store = store
                self._sweeper = asyncio.create_task(self._sweep(store))
            return self._store

    # -- what clients ask for -----------------------------------------------------------------------------------

    async def submit(self, speech: SpeechRequest, fields: Mapping[str, Any], owner: str) -> Job:
        """A new job, in line. `fields`: the body as it came. Raises BadRequest, NotFound, QueueFull, ModelUnavailable."""
        store = await self.store()
        most = self._settings().max_jobs
        if sum(job.owner == owner and not job.over for job in self._live.values()) >= most:
            raise QueueFull(f"{most} speech jobs are unfinished already; delete one or wait", retry_after=60)
        model = self._places.find(speech.model)
        spec = await asyncio.to_thread(self._spec, speech, fields, model)
        job = Job(f"job_{uuid.uuid4().hex}", owner, model.id, self._clock(), spec)
        await store.save(job)
        self._begin(job)
        return job

    async def find(self, id: str, owner: str) -> Job:
        """A job of this owner. Raises NotFound, also for other people's jobs."""
        store = await self.store()
        job = self._live.get(id) or await store.get(id)
        if job is None or job.owner != owner:
            raise NotFound(f"no speech job {id!r}", param="id", code="job_not_found")
        return job

    async def all(self, owner: str, *, limit: int, before: float | None = None) -> list[Job]:
        """This owner's jobs, the newest first."""
        store = await self.store()
        listed = await store.of_owner(owner, limit=limit, before=before)
        return [self._live.get(job.id, job) for job in listed]

    async def cancel(self, job: Job) -> None:
        """Stop a job; returns when its work has stopped and the lease is free."""
        task = self._tasks.get(job.id)
        if task is None:
            return
        self._cancelling.add(job.id)
        task.cancel()
        await asyncio.wait({task})
        self._cancelling.discard(job.id)

    async def forget(self, job: Job) -> None:
        """Delete an ended job and its audio."""
        await (await self.store()).delete(job)

    async def audio(self, job: Job) -> Path:
        """Where the job's samples are: of them the first `job.samples` are complete."""
        return (await self.store()).audio(job)

    def position(self, job: Job) -> int | None:
        """Place in the lease's line, from 1; None for a job that does not wait."""
        if job.status != "queued":
            return None
        try:
            return self._places.position(job.model, _ticket(job))
        except NotFound:
            return None  # its model is not in the configuration any more; it is about to fail

    def expires(self, job: Job) -> float | None:
        """When the job is forgotten; None while it is not over."""
        return job.ended + self._settings().ttl if job.ended is not None else None

    def _spec(self, speech: SpeechRequest, fields: Mapping[str, Any], model: SpeechModel) -> JobSpec:
        if model.backend is not None:
            script = Script(speech, self._places.backend(model.backend), self._speech_settings())
            return JobSpec(
                script.pieces, script.voice, script.instructions, script.native_speed, script.tempo,
                speech.response_format, script.input_tokens,
            )  # fmt: skip
        pieces = tuple(sentences(speech.input))
        if not pieces:
            raise BadRequest("input has nothing that can be spoken", param="input")
        return JobSpec(pieces, "", "", 1.0, 1.0, speech.response_format, fields=dict(fields))

    # -- the work -----------------------------------------------------------------------------------------------

    def _begin(self, job: Job) -> None:
        self._live[job.id] = job
        self._tasks[job.id] = asyncio.create_task(self._work(job))

    async def _work(self, job: Job) -> None:
        """From the first slice to the last; every ending is written down, but for the end of this process."""
        try:
            while job.sentences < len(job.spec.pieces):
                await self._next_slice(job)
            if not job.samples:
                raise BadRequest("the voice has no sounds for this input", param="input")
            await self._end(job, "done")
        except LeaseClosed:
            return  # the next process goes on
        except LeaseCancelled as error:
            await self._end(job, "cancelled", error)
        except asyncio.CancelledError:
            if job.id not in self._cancelling:
                raise
            await self._end(job, "cancelled")
        except Exception as error:
            logger.error("speech job failed id=%s: %s", job.id, error, exc_info=as_proxy_error(error).status == 500)
            await self._end(job, "failed", error)
        finally:
            self._live.pop(job.id, None)
            self._tasks.pop(job.id, None)
            job.tell()

    async def _end(self, job: Job, status: Status, error: Exception | None = None) -> None:
        told = as_proxy_error(error).body()["error"] if error is not None else None
        if self._store is not None:
            await self._store.update(job, status=status, ended=self._clock(), error=told)
        logger.info("speech job %s id=%s sentences=%d audio_s=%.1f", status, job.id, job.sentences, job.seconds)

    async def _next_slice(self, job: Job) -> None:
        """One turn with the lease. A wait that was too long for a request is no reason to give up a job."""
        try:
            async with self._places.hold(job.model, _ticket(job)) as hold:
                assert self._store is not None
                started = job.started if job.started is not None else self._clock()
                await self._store.update(job, status="running", started=started)
                model = self._places.find(job.model)
                try:
                    if model.backend is not None:
                        await self._speak(job, self._places.backend(model.backend), hold.opened)
                    else:
                        await self._ask(job, model, hold.opened)
                finally:
                    job.status = "queued"
        except WaitTooLong:
            await asyncio.sleep(_PAUSE)
        except QueueFull as full:
            await asyncio.sleep(float(full.headers["Retry-After"]))
        job.tell()

    async def _speak(self, job: Job, backend: SpeechBackend, opened: Callable[[], None]) -> None:
        """Sentences, one by one, until the slice is full."""
        loop = asyncio.get_running_loop()
        began, first, tokens, characters = loop.time(), job.samples, job.tokens, 0

        def first_audio() -> None:
            opened()
            if self._listener is not None:
                self._listener.speech_first_audio(backend.name, loop.time() - began)

        heard: Callable[[], object] = partial(loop.call_soon_threadsafe, first_audio)
        try:
            while job.sentences < len(job.spec.pieces):
                cancel = threading.Event()
                say = partial(self._say, job, backend, cancel, heard)
                samples, made = await threads.run(say, cancel.set)
                characters += len(job.spec.pieces[job.sentences])
                await self._advance(job, samples, 1, made)
                heard = _nothing
                if (job.samples - first) / OUT_RATE / job.spec.tempo >= self._settings().slice:
                    break
        finally:
            if self._listener is not None:
                seconds = (job.samples - first) / OUT_RATE / job.spec.tempo
                made_here = job.tokens - tokens
                self._listener.speech_done(backend.name, seconds, loop.time() - began, made_here, characters)

    def _say(
        self, job: Job, backend: SpeechBackend, cancel: threading.Event, heard: Callable[[], Any]
    ) -> tuple[int, int]:
        """In a thread: the next sentence's samples into the file. Returns how many, and the tokens they took."""
        spec = job.spec
        utterance = Utterance(spec.pieces[job.sentences], spec.voice, spec.instructions, spec.native_speed)
        reshaper = Reshaper(backend.sample_rate, out_rate=OUT_RATE)
        written = tokens = 0
        assert self._store is not None
        with _at_end(self._store.audio(job), job.samples) as file:
            with closing(backend.synthesize(utterance, cancel)) as chunks:
                for chunk in chunks:
                    if chunk.samples.size:
                        heard()
                    tokens += chunk.tokens
                    written += file.write(to_pcm(reshaper.push(chunk.samples)))
            written += file.write(to_pcm(reshaper.finish()))
        if cancel.is_set():
            raise Cancelled
        return written // 2, tokens

    async def _ask(self, job: Job, model: SpeechModel, opened: Callable[[], None]) -> None:
        """As many sentences as make a slice, in one request to the model's upstream."""
        pieces = _batch(job.spec.pieces[job.sentences :], self._settings().slice)
        fields = {**job.spec.fields, "model": model.id, "input": " ".join(pieces), "response_format": "wav"}
        fields.pop("stream_format", None)
        answer = await self._places.post(model, "/v1/audio/speech", fields, _ticket(job))
        opened()
        samples = await threads.run(partial(self._keep, job, answer), lambda: None)
        await self._advance(job, samples, len(pieces), 0)

    def _keep(self, job: Job, answer: bytes) -> int:
        """In a thread: an upstream's audio into the file. Returns the number of samples."""
        try:
            audio, rate = read_audio(answer, longest=_LONGEST_ANSWER, param="the upstream's answer")
        except InvalidInput as error:
            raise UpstreamError(str(error), code="upstream_error") from error
        reshaper = Reshaper(rate, out_rate=OUT_RATE)
        assert self._store is not None
        with _at_end(self._store.audio(job), job.samples) as file:
            return (file.write(to_pcm(reshaper.push(audio))) + file.write(to_pcm(reshaper.finish()))) // 2

    async def _advance(self, job: Job, samples: int, pieces: int, tokens: int) -> None:
        assert self._store is not None
        await self._store.update(
            job, samples=job.samples + samples, sentences=job.sentences + pieces, tokens=job.tokens + tokens
        )

    async def _sweep(self, store: JobStore) -> None:
        """Forget jobs that ended more than `ttl` ago."""
        while True:
            try:
                for job in await store.ended_before(self._clock() - self._settings().ttl):
                    await store.delete(job)
                    logger.info("speech job expired id=%s", job.id)
            except (OSError, sqlite3.Error):
                logger.exception("expired speech jobs cannot be deleted; tried again in a minute")
            await asyncio.sleep(min(_SWEEP, max(1.0, self._settings().ttl / 2)))


def _ticket(job: Job) -> str:
    """The job's id in the lease's line; it waits there once at a time."""
    return job.id


def _nothing() -> None:
    """The first audio is no news any more."""


def _batch(pieces: tuple[str, ...], seconds: float) -> tuple[str, ...]:
    """The first pieces that together take about so long to speak; at least one."""
    length = 0
    for count, piece in enumerate(pieces, 1):
        length += len(piece)
        if length >= seconds * _CHARACTERS_PER_SECOND:
            return pieces[:count]
    return pieces


def _at_end(path: Path, samples: int) -> BinaryIO:
    """The file, open behind its first `samples`; what lies there is cut off: it is part of an unfinished sentence."""
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(2 * samples)
    file.seek(2 * samples)
    return file
