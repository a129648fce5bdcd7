"""The voice routes: what can be spoken with, here and at upstreams, and new voices from recordings.

Listing and deleting take no lease. A new voice computes on the device, so it takes the write lease, after the upload
has been read, checked and decoded. File names of a client are never looked at; a voice's id is made here from its
name, of lower-case letters, digits, - and _ alone, so no path from a client reaches the file system.
"""

import asyncio
import hashlib
import re
import time
import unicodedata
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

from aiohttp import hdrs, web

from backends.api import Samples, SpeechBackend, Voice
from backends.decode import read_audio
from proxy import facts, threads
from proxy.body import Body
from proxy.errors import BadRequest, BodyTooLarge, NotFound
from proxy.form import read_form, text_field
from proxy.places import Places, SpeechModel
from proxy.speech_request import as_proxy_error
from proxy.upstream_voices import UpstreamVoices, read_voices

Endpoint = Callable[[web.Request], Awaitable[web.StreamResponse]]
ForwardRead = Callable[[web.Request, Body], Awaitable[web.StreamResponse]]

SHORTEST, LONGEST = 1.0, 30.0
"""Seconds of a recording."""

_COMPUTING = 600.0  # seconds, the longest that a new voice may take
_MAX_NAME = 64
_MAX_TRANSCRIPT = 4096


class Voices:
    """The endpoints. `forward` answers a request for an upstream; `forward_read` one whose body is read already."""

    def __init__(
        self,
        places: Places,
        forward: Endpoint,
        forward_read: ForwardRead,
        *,
        max_upload: Callable[[], int],
        max_body: Callable[[], int],
        patience: float = 2.0,
    ) -> None:
        """`max_upload`: bytes of a recording; `max_body`: bytes of a request; asked for at each, as they may change.
        `patience`: seconds that a list waits for upstreams whose voices are not known yet."""
        self._places = places
        self._forward = forward
        self._forward_read = forward_read
        self._max_upload = max_upload
        self._max_body = max_body
        self._upstream = UpstreamVoices(self._fetch, patience=patience)

    def routes(self) -> Iterator[tuple[str, str, Endpoint]]:
        """(methods, path, endpoint)."""
        yield "GET HEAD", "/v1/audio/voices", self.list
        yield "POST", "/v1/audio/voices", self.add
        yield "DELETE", "/v1/audio/voices/{id}", self.delete
        for path in ("/audio/voices", "/v1/voices", "/voices"):
            yield "GET HEAD", path, self.list
            yield "POST PUT PATCH DELETE", path, self._forward  # other servers' own ways to manage voices
        for path in ("/v1/audio/models", "/audio/models"):
            yield "GET HEAD", path, self.models

    async def close(self) -> None:
        """Stop what runs in the background."""
        await self._upstream.close()

    async def list(self, request: web.Request) -> web.StreamResponse:
        """All voices, each with the model and the place that it belongs to; `?legacy=true`: names alone.

        Models of upstreams whose voices are not known yet are named in a header.
        """
        models = list(self._places.models())
        if wanted := request.query.get("model"):
            model = self._places.find(wanted)
            if model.upstream is not None:
                return await self._forward(request)
            models = [model]
        entries = [_entry(voice, model) for model in _one_each(models) for voice in self._local_voices(model)]
        remote = [model for model in models if model.upstream is not None]
        known = await self._upstream.of(remote)
        entries += [_entry(voice, model) for model in remote for voice in known.get(model.id, ())]
        missing = [model.id for model in remote if model.id not in known]
        first: dict[str, str] = {}  # clients key this list by the id
        for entry in entries:
            first.setdefault(entry["id"], entry["name"])
        names: list[Any] = [{"id": id, "name": name} for id, name in first.items()]
        if request.query.get("legacy", "").lower() in ("1", "true", "yes"):
            names = list(first)
        return web.json_response(
            {"object": "list", "data": entries, "voices": names},
            headers={"X-Unavailable-Models": ", ".join(missing)} if missing else {},
        )

    async def models(self, _: web.Request) -> web.StreamResponse:
        """The models that speak."""
        entries = [
            {"id": model.id, "object": "model", "created": 0, "owned_by": model.owner}
            for model in self._places.models()
        ]
        names = [{"id": entry["id"], "name": entry["id"]} for entry in entries]
        return web.json_response({"object": "list", "data": entries, "models": names})

    async def add(self, request: web.Request) -> web.StreamResponse:
        """Make a voice from a form: name, file or audio_sample, transcript or ref_text, and model where several speak."""
        body = await Body.read(request.content, self._max_body())
        try:
            kind = request.headers.get(hdrs.CONTENT_TYPE, "")
            if not kind.lower().startswith("multipart/form-data"):
                return await self._forward_read(request, body)  # llama-swap's own call is JSON
            fields = read_form(body.content(), kind)
            model = self._model_for(text_field(fields, "model"))
            if model.backend is None:
                answer = await self._forward_read(request, body)
                self._upstream.forget(model.id)
                return answer
        finally:
            body.close()
        return web.json_response(_entry(await self._learn(request, model, fields), model))

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """Forget a voice that was made from a recording."""
        id = request.match_info["id"]
        if (wanted := request.query.get("model")) and (model := self._places.find(wanted)).upstream is not None:
            answer = await self._forward(request)
            self._upstream.forget(model.id)
            return answer
        for model in _one_each(self._places.models()):
            if any(voice.id == id for voice in self._local_voices(model)):
                try:
                    await asyncio.to_thread(self._backend(model).delete_voice, id)
                except Exception as error:
                    raise as_proxy_error(error) from error
                return web.json_response({"id": id, "object": "audio.voice.deleted", "deleted": True})
        raise NotFound(f"no voice {id!r} was made here", param="voice", code="voice_not_found")

    # -- a new voice --------------------------------------------------------------------------------------------

    def _model_for(self, wanted: str) -> SpeechModel:
        if wanted:
            return self._places.find(wanted)
        models = _one_each(self._places.models())
        local = [model for model in models if model.backend is not None]
        able = [model for model in local if self._backend(model).can_clone]
        choices = able or local or models
        if not choices:
            raise NotFound("no model speaks here", param="model", code="model_not_found")
        if len(choices) > 1:
            names = ", ".join(model.id for model in choices)
            raise BadRequest(f"model is required, as several speak: {names}", param="model")
        return choices[0]

    async def _learn(self, request: web.Request, model: SpeechModel, fields: dict[str, bytes]) -> Voice:
        backend = self._backend(model)
        if not backend.can_clone:
            known = ", ".join(voice.id for voice in backend.voices())
            raise BadRequest(
                f"the model {model.id!r} cannot learn voices; it has {known}", param="model", code="unsupported"
            )
        name = check_name(text_field(fields, "name"))
        transcript = text_field(fields, "transcript", "ref_text")
        if len(transcript) > _MAX_TRANSCRIPT:
            message = f"transcript may have {_MAX_TRANSCRIPT} characters, not {len(transcript)}"
            raise BadRequest(message, param="transcript")
        id = voice_id(name)
        if any(id == voice.id or name == voice.name for voice in backend.voices()):
            raise BadRequest(f"there is a voice {name!r} already; delete it first", param="name", code="voice_exists")
        param, recording = self._recording(fields)
        try:
            samples, rate = await asyncio.to_thread(_read, recording, param)
            async with self._places.hold(model.id, facts.of(request).id):
                # A voice that is being computed cannot be stopped half-way, so a client that goes does not stop it.
                learn = partial(backend.add_voice, id, name, samples, rate, transcript)
                return await threads.run(learn, lambda: None, patience=_COMPUTING)
        except Exception as error:
            raise as_proxy_error(error) from error

    def _recording(self, fields: dict[str, bytes]) -> tuple[str, bytes]:
        for param in ("file", "audio_sample"):
            if data := fields.get(param):
                if len(data) > self._max_upload():
                    raise BodyTooLarge(f"{param} is over max_upload, {self._max_upload()} bytes", param=param)
                return param, data
        raise BadRequest("file is required: a recording of 1 to 30 seconds", param="file")

    # -- places -------------------------------------------------------------------------------------------------

    def _backend(self, model: SpeechModel) -> SpeechBackend:
        assert model.backend is not None
        return self._places.backend(model.backend)

    def _local_voices(self, model: SpeechModel) -> Sequence[Voice]:
        return self._backend(model).voices() if model.backend is not None else ()

    async def _fetch(self, model: SpeechModel) -> Sequence[Voice]:
        id = f"voices-{model.id}-{time.time_ns():x}"
        async with self._places.hold(model.id, id):
            return read_voices(await self._places.get(model, f"/v1/audio/voices?model={quote(model.id, safe='')}", id))


def check_name(name: str) -> str:
    """A voice's name as given, if it can be one. Raises BadRequest, param "name"."""
    if not 1 <= len(name) <= _MAX_NAME:
        raise BadRequest(f"name must have 1 to {_MAX_NAME} characters, not {len(name)}", param="name")
    if not name.isprintable():
        raise BadRequest("name has characters that cannot be printed", param="name")
    return name


def voice_id(name: str) -> str:
    """The id for a name: 1 to 64 of [a-z0-9_-]; names without such letters get a digest of themselves."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode("ascii").lower()
    slug = re.sub(r"[^a-z0-9_]+", "-", plain)[:_MAX_NAME].strip("-")
    return slug or "voice-" + hashlib.sha256(name.encode("utf-8")).hexdigest()[:12]


def _read(recording: bytes, param: str) -> tuple[Samples, int]:
    samples, rate = read_audio(recording, longest=LONGEST, param=param)
    if samples.size < SHORTEST * rate:
        message = f"{param} lasts {samples.size / rate:.2f} s; a voice needs {SHORTEST:g} to {LONGEST:g} s"
        raise BadRequest(message, param=param)
    return samples, rate


def _one_each(models: Sequence[SpeechModel]) -> Sequence[SpeechModel]:
    """The first model of each backend: several names of one model have one set of voices."""
    seen: dict[tuple[str | None, str | None, str], SpeechModel] = {}
    for model in models:
        seen.setdefault((model.backend, model.upstream, "" if model.backend is not None else model.id), model)
    return list(seen.values())


def _entry(voice: Voice, model: SpeechModel) -> dict[str, Any]:
    return {
        "id": voice.id,
        "object": "audio.voice",
        "name": voice.name,
        "created_at": voice.created_at,
        "model": model.id,
        "owned_by": model.owner,
    }
