"""The embedded default voice: hibari, 8 MB a voice, English, many times faster than speech on one CPU core.

Voice "heart" lies in the package; the others are used if their files are in hibari's own cache already
(`hibari --voice emma ...` fetches one). Nothing is ever downloaded here: a request must not wait for a network.
"""

import os
import re
import threading
import unicodedata
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from backends.api import AudioChunk, Samples, Utterance, Voice
from backends.errors import BackendUnavailable, Cancelled, InvalidInput, SynthesisFailed, UnknownVoice, Unsupported
from backends.options import Options
from backends.text import sentences

_WORDS = re.compile(r"\w+|[^\w\s]")
_LONG_NUMBER = re.compile(r"\d{16,}")


def create(name: str, options: Mapping[str, Any]) -> "HibariBackend":
    """Options: `voice` (the default one, "heart"), `threads` (1), `seed` (0: the same text sounds the same)."""
    given = Options(options)
    voice = given.text("voice", "heart")
    threads = given.integer("threads", 1, low=1, high=64)
    seed = given.integer("seed", 0, low=0, high=2**63 - 1)
    given.done()
    return HibariBackend(name, voice=voice, threads=threads, seed=seed)


class HibariBackend:
    """A `SpeechBackend` (backends/api.py) of the hibari-tts package."""

    speed_range = (0.5, 2.0)
    can_clone = False

    def __init__(self, name: str, *, voice: str = "heart", threads: int = 1, seed: int = 0) -> None:
        """Raises BackendUnavailable (package missing) and UnknownVoice (`voice` is not on this machine)."""
        try:
            import hibari
            import hibari.voices
        except ImportError as error:
            raise BackendUnavailable(f"{name}: package hibari-tts is not installed ({error})") from error
        self.name = name
        self.sample_rate: int = hibari.Hibari.sample_rate
        self._package = hibari
        self._threads = threads
        self._seed = seed
        self._loaded = False
        self._models: dict[str, Any] = {}
        # Held by the one synthesis at a time, for all of an utterance: hibari keeps caches that are not made for
        # two threads, and `unload` has to wait for it.
        self._busy = threading.Lock()
        self._default = voice
        if voice not in (known := self._on_disk()):
            raise UnknownVoice(voice, known)

    @property
    def loaded(self) -> bool:
        return self._loaded

    def load(self) -> None:
        with self._busy:
            self._model(self._default)
            self._loaded = True

    def unload(self) -> None:
        with self._busy:
            self._models.clear()
            self._loaded = False

    def close(self) -> None:
        self.unload()

    def voices(self) -> Sequence[Voice]:
        known = self._on_disk()
        known.sort(key=lambda voice: voice != self._default)
        return [Voice(id=voice, name=voice.capitalize()) for voice in known]

    def split(self, text: str) -> Sequence[str]:
        return sentences(text)

    def count_tokens(self, text: str) -> int:
        """Words and punctuation marks: the model's own units are phonemes, which no user can check."""
        return len(_WORDS.findall(text))

    def synthesize(self, utterance: Utterance, cancel: threading.Event) -> Generator[AudioChunk, None, None]:
        low, high = self.speed_range
        if not low <= utterance.speed <= high:
            raise InvalidInput(f"speed must be from {low} to {high}, not {utterance.speed}", param="speed")
        if utterance.voice not in (known := self._on_disk()):
            raise UnknownVoice(utterance.voice, known)
        self._enter(cancel)
        try:
            if not self._loaded:
                raise BackendUnavailable(f"{self.name} is not loaded")
            yield from self._speak(utterance, cancel)
        finally:
            self._busy.release()

    def add_voice(self, voice_id: str, name: str, audio: Samples, sample_rate: int, transcript: str) -> Voice:
        self._cannot_clone()

    def delete_voice(self, voice_id: str) -> None:
        if voice_id not in (known := self._on_disk()):
            raise UnknownVoice(voice_id, known)
        raise Unsupported(f"voice {voice_id!r} is built in and cannot be deleted", param="voice")

    def _cannot_clone(self) -> NoReturn:
        raise Unsupported(f"{self.name} has fixed voices and cannot learn new ones", param="model")

    def _enter(self, cancel: threading.Event) -> None:
        # The lease lets one request in at a time, so this waits only for a worker that is just stopping.
        while not self._busy.acquire(timeout=0.1):
            if cancel.is_set():
                raise Cancelled
        if cancel.is_set():
            self._busy.release()
            raise Cancelled

    def _speak(self, utterance: Utterance, cancel: threading.Event) -> Generator[AudioChunk, None, None]:
        model = self._model(utterance.voice)
        noise = np.random.default_rng(self._seed if utterance.seed is None else utterance.seed)
        with self._failures(utterance.text):
            parts = model.phonemize(_readable(utterance.text))
        for phonemes in parts:
            if cancel.is_set():
                raise Cancelled
            with self._failures(utterance.text):
                samples = model.from_ids(model.ids(phonemes), utterance.speed, noise)
            if samples.size:
                yield AudioChunk(np.asarray(samples, dtype=np.float32))

    @contextmanager
    def _failures(self, text: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise SynthesisFailed(f"{self.name} cannot speak {text[:40]!r}: {error!r}") from error

    def _model(self, voice: str) -> Any:
        if voice not in self._models:
            try:
                model = self._package.Hibari(voice=voice, model=self._path(voice), threads=self._threads)
                model.phonemize("warm.")  # reads the lexicons now, not in the first request
            except Exception as error:
                raise BackendUnavailable(f"{self.name}: voice {voice!r} cannot be loaded: {error}") from error
            self._models[voice] = model
        return self._models[voice]

    def _path(self, voice: str) -> str:
        path: str = self._package.voices.voice_path(voice, download_missing=False)
        return path

    def _on_disk(self) -> list[str]:
        """Ids of the voices whose model file is here and of the right size."""
        return [voice for voice, entry in self._package.voices.VOICES.items() if self._complete(voice, entry["bytes"])]

    def _complete(self, voice: str, size: int) -> bool:
        try:
            return os.path.getsize(self._path(voice)) == size
        except OSError:
            return False


def _readable(text: str) -> str:
    """The text without what hibari's number reader cannot take: digits such as ① and ², and numbers over 10^15."""
    plain = "".join(str(unicodedata.digit(c)) if c.isdigit() and not c.isdecimal() else c for c in text)
    return _LONG_NUMBER.sub(lambda number: " ".join(number.group()), plain)
