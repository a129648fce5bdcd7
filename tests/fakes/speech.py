"""FakeSpeech: a SpeechBackend whose audio is a tone per character, with gates, failures and counts."""

import re
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from backends.api import AudioChunk, Samples, Utterance, Voice
from backends.errors import BackendUnavailable, Cancelled, InvalidInput, SynthesisFailed, UnknownVoice, Unsupported

RATE = 24_000


def spoken(text: str, *, voice: str = "alba", speed: float = 1.0, samples: int = 480) -> Samples:
    """What FakeSpeech says for one piece of text: `samples` / speed of audio for each character."""
    return np.concatenate([_tone(letter, voice, speed, samples) for letter in text])


def _tone(letter: str, voice: str, speed: float, samples: int) -> Samples:
    pitch = 100 + (ord(letter) * 7 + sum(voice.encode())) % 900
    time = np.arange(round(samples / speed), dtype=np.float32) / RATE
    return (0.3 * np.sin(2 * np.pi * pitch * time)).astype(np.float32)


@dataclass(eq=False)
class SpeechGate:
    """Holds the synthesis before the character number `at` of its piece of text. `reached` is for other threads."""

    piece: int
    at: int
    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def open(self) -> None:
        """Let the synthesis go on."""
        self.opened.set()

    def wait(self, cancel: threading.Event) -> None:
        """Stand at the gate, with an eye on the cancel flag."""
        self.reached.set()
        while not self.opened.wait(0.002):
            if cancel.is_set():
                return


class FakeSpeech:
    """Speaks at once unless held. Pieces of text are counted from 1 over the life of the backend.

    `samples`: per character. `fail_at`: the pieces that fail, after half of their audio. `fail_load`: why the
    model cannot be loaded. Counts: `active` and `most_active` synthesises at a time, `started`, `finished`,
    `cancelled` pieces, `loads`, `unloads`; `threads` are the names of all threads that ever ran one.
    """

    def __init__(self, name: str = "fake", *, samples: int = 480, can_clone: bool = True) -> None:
        self.name = name
        self.sample_rate = RATE
        self.speed_range = (0.5, 2.0)
        self.can_clone = can_clone
        self.samples = samples
        self.fail_at: set[int] = set()
        self.fail_load: str | None = None
        self.active = self.most_active = self.started = self.finished = self.cancelled = self.loads = self.unloads = 0
        self.threads: set[str] = set()
        self.said: list[Utterance] = []
        self._loaded = self._closed = False
        self._gates: list[SpeechGate] = []
        self._learned: dict[str, Voice] = {}
        self._changed = threading.Condition()

    @property
    def loaded(self) -> bool:
        return self._loaded

    def hold(self, piece: int = 1, at: int = 0) -> SpeechGate:
        """A gate before character `at` (from 0) of the piece with this number (from 1)."""
        gate = SpeechGate(piece, at)
        self._gates.append(gate)
        return gate

    def load(self) -> None:
        if self.fail_load or self._closed:
            raise BackendUnavailable(self.fail_load or "closed")
        self.loads += not self._loaded
        self._loaded = True

    def unload(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.active == 0)
        self.unloads += self._loaded
        self._loaded = False

    def close(self) -> None:
        self.unload()
        self._closed = True

    def voices(self) -> Sequence[Voice]:
        return [Voice("alba", "Alba"), Voice("bruno", "Bruno"), *self._learned.values()]

    def split(self, text: str) -> Sequence[str]:
        return [piece for piece in re.split(r"(?<=[.!?])\s+", text.strip()) if piece]

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def synthesize(self, utterance: Utterance, cancel: threading.Event) -> Generator[AudioChunk, None, None]:
        if not self._loaded:
            raise BackendUnavailable(f"{self.name} is not loaded")
        known = [voice.id for voice in self.voices()]
        if utterance.voice not in known:
            raise UnknownVoice(utterance.voice, known)
        return self._speak(utterance, cancel)

    def _speak(self, utterance: Utterance, cancel: threading.Event) -> Generator[AudioChunk, None, None]:
        with self._changed:
            self.started += 1
            self.active += 1
            self.most_active = max(self.most_active, self.active)
            piece = self.started
            self.said.append(utterance)
            self.threads.add(threading.current_thread().name)
        try:
            for at, letter in enumerate(utterance.text):
                for gate in [gate for gate in self._gates if (gate.piece, gate.at) == (piece, at)]:
                    gate.wait(cancel)
                if cancel.is_set():
                    self.cancelled += 1
                    raise Cancelled
                if piece in self.fail_at and at >= len(utterance.text) // 2:
                    raise SynthesisFailed(f"piece {piece} failed as told")
                yield AudioChunk(_tone(letter, utterance.voice, utterance.speed, self.samples), tokens=1)
            self.finished += 1
        finally:
            with self._changed:
                self.active -= 1
                self._changed.notify_all()

    def add_voice(self, voice_id: str, name: str, audio: Samples, sample_rate: int, transcript: str) -> Voice:
        if not self.can_clone:
            raise Unsupported("no voice cloning here", param="file")
        if not 1.0 <= len(audio) / sample_rate <= 30.0:
            raise InvalidInput("a voice needs 1 to 30 seconds of audio", param="file")
        self._learned[voice_id] = Voice(voice_id, name, created_at=1, builtin=False)
        return self._learned[voice_id]

    def delete_voice(self, voice_id: str) -> None:
        if voice_id in ("alba", "bruno"):
            raise Unsupported("a built-in voice stays", param="voice")
        if self._learned.pop(voice_id, None) is None:
            raise UnknownVoice(voice_id, [voice.id for voice in self.voices()])
