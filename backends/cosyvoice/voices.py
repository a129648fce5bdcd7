"""The library of voices on disk, and their features beside them.

One folder per voice, its name the voice's id:
    voice.json     name, transcript ("" where nobody knows it), created_at (Unix time)
    audio.wav      the recording, 24 kHz mono, 16 bits
    features.npz   what the models made of it, and which models; made anew when they change
A folder is written under a name with a dot in front and then renamed, so a voice is there whole or not at all. A
folder with the first two files that someone put there by hand is a voice as well.
"""

import json
import logging
import re
import shutil
import threading
import time
import wave
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from backends.api import Samples, Voice
from backends.cosyvoice.voice_encoder import VoiceFeatures
from backends.errors import BackendUnavailable, InvalidInput, UnknownVoice

logger = logging.getLogger(__name__)

RATE = 24000
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class StoredVoice:
    """What voice.json says."""

    name: str
    transcript: str
    created_at: int


class VoiceLibrary:
    """All voices of one backend. Any thread may use it; no path is made of anything but a checked id."""

    def __init__(self, folder: Path) -> None:
        """Reads the library; a folder that is no voice is logged and left alone."""
        self._folder = folder
        self._lock = threading.Lock()
        self._voices: dict[str, StoredVoice] = {}
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.name.startswith((".new-", ".old-")):  # of a run that was killed
                shutil.rmtree(path, ignore_errors=True)
            if path.name.startswith(".") or not path.is_dir():
                continue
            try:
                check_id(path.name)
                self._voices[path.name] = _read_description(path / "voice.json")
            except (InvalidInput, OSError, ValueError, KeyError, TypeError) as error:
                logger.warning("%s is not a voice and is left out: %s", path, error)

    def list(self) -> list[Voice]:
        """All voices, the oldest first."""
        with self._lock:
            stored = sorted(self._voices.items(), key=lambda item: (item[1].created_at, item[0]))
        return [Voice(id, voice.name, voice.created_at, builtin=False) for id, voice in stored]

    def get(self, voice_id: str) -> StoredVoice:
        """Raises UnknownVoice."""
        with self._lock:
            if voice_id not in self._voices:
                raise UnknownVoice(voice_id, sorted(self._voices))
            return self._voices[voice_id]

    def add(
        self, voice_id: str, name: str, transcript: str, audio: Samples, features: VoiceFeatures, made_by: str
    ) -> Voice:
        """Store a voice; `audio` has 24,000 samples a second. Raises InvalidInput (param "name") for a taken id."""
        check_id(voice_id)
        voice = StoredVoice(name, transcript, int(time.time()))
        with self._lock:
            if voice_id in self._voices:
                raise InvalidInput(f"there is a voice {voice_id!r} already", param="name")
            new = self._folder / f".new-{voice_id}"
            new.mkdir(parents=True)
            try:
                (new / "voice.json").write_text(json.dumps(asdict(voice), ensure_ascii=False), encoding="utf-8")
                _write_wav(new / "audio.wav", audio)
                _write_features(new / "features.npz", features, made_by)
                new.rename(self._folder / voice_id)
            except BaseException:
                shutil.rmtree(new, ignore_errors=True)
                raise
            self._voices[voice_id] = voice
        return Voice(voice_id, name, voice.created_at, builtin=False)

    def delete(self, voice_id: str) -> None:
        """Raises UnknownVoice."""
        self.get(voice_id)
        with self._lock:
            self._voices.pop(voice_id, None)
            gone = self._folder / f".old-{voice_id}"
            (self._folder / voice_id).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def features(self, voice_id: str, made_by: str, make: Callable[[Samples, int], VoiceFeatures]) -> VoiceFeatures:
        """The features, read; `make(audio, rate)` is called, and its result stored, if `made_by` did not make them.

        Raises UnknownVoice, BackendUnavailable (audio.wav is broken or missing), and what `make` raises.
        """
        self.get(voice_id)
        folder = self._folder / voice_id
        try:
            return _read_features(folder / "features.npz", made_by)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            logger.info("making the features of voice %s anew: %s", voice_id, error)
        try:
            audio, rate = _read_wav(folder / "audio.wav")
        except (OSError, EOFError, ValueError, wave.Error) as error:
            raise BackendUnavailable(f"{folder / 'audio.wav'} cannot be read as 16-bit WAV: {error}") from error
        features = make(audio, rate)
        _write_features(folder / "features.npz", features, made_by)
        return features


def check_id(voice_id: str) -> None:
    """Raises InvalidInput (param "name") for an id that could be anything but a folder's name."""
    if not _ID.fullmatch(voice_id):
        raise InvalidInput(
            f"{voice_id!r} cannot be a voice's id: 1 to 64 letters, digits, hyphens and underscores", param="name"
        )


def _read_description(path: Path) -> StoredVoice:
    content = json.loads(path.read_text(encoding="utf-8"))
    return StoredVoice(str(content["name"]), str(content.get("transcript", "")), int(content.get("created_at", 0)))


def _write_wav(path: Path, audio: Samples) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(audio, -1, 1) * 32767).astype("<i2").tobytes())


def _read_wav(path: Path) -> tuple[Samples, int]:
    with wave.open(str(path), "rb") as file:
        if file.getsampwidth() != 2:
            raise ValueError(f"{8 * file.getsampwidth()} bits a sample")
        raw = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
        return (raw.mean(axis=1) / 32768).astype(np.float32), file.getframerate()


def _write_features(path: Path, features: VoiceFeatures, made_by: str) -> None:
    partial = path.with_name(f".{path.name}")
    with partial.open("wb") as file:
        np.savez(file, made_by=np.array(made_by), **asdict(features))
    partial.replace(path)


def _read_features(path: Path, made_by: str) -> VoiceFeatures:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
        if str(content["made_by"]) != made_by:
            raise ValueError(f"they were made by {content['made_by']}, the models now are {made_by}")
        return VoiceFeatures(content["tokens"], content["mel"], content["embedding"])
