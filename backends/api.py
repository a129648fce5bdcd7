"""What a speech backend is: the one interface between the proxy and a speech model.

A backend is synchronous and knows nothing of HTTP, leases or event loops. The proxy calls it from one
worker thread at a time, and only while the request holds the lease. Audio is float32 mono in [-1, 1] at
`sample_rate`; encoding, resampling and the rest of a tempo change are done outside (backends/audio.py).
"""

import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]
"""Audio: shape (samples,), float32, mono, in [-1, 1]."""


@dataclass(frozen=True, slots=True)
class Utterance:
    """One piece of text to speak, as `SpeechBackend.split` cut it.

    `speed` is a factor (1.0 = the voice's own pace) inside the backend's `speed_range`; `seed` makes the
    result reproducible; `instructions` is a style in words, which a backend without styles ignores.
    """

    text: str
    voice: str
    instructions: str = ""
    speed: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """Some audio, in order. `tokens`: speech tokens decoded for it (0 where the model has none)."""

    samples: Samples
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Voice:
    """A voice that a backend can speak with. `created_at` is Unix time in seconds, 0 for built-in ones."""

    id: str
    name: str
    created_at: int = 0
    builtin: bool = True


class SpeechBackend(Protocol):
    """A speech model in this process.

    Life: created (cheap, reads no weights, checks its options) -> load() -> synthesize() ... -> unload()
    -> load() ... -> close(). `load` and `unload` are idempotent and block; call them in a worker thread.
    """

    name: str
    sample_rate: int
    speed_range: tuple[float, float]
    can_clone: bool

    @property
    def loaded(self) -> bool:
        """True between a `load` that succeeded and the next `unload`."""
        ...

    def load(self) -> None:
        """Bring the weights to where they are used. Raises BackendUnavailable."""
        ...

    def unload(self) -> None:
        """Give the device memory back. Waits for a synthesis in progress to end."""
        ...

    def close(self) -> None:
        """Unload for good."""
        ...

    def voices(self) -> Sequence[Voice]:
        """All voices, the default first. Never touches the device."""
        ...

    def split(self, text: str) -> Sequence[str]:
        """Cut a text into the pieces that are spoken one by one. Pure; [] for a text with nothing to say."""
        ...

    def count_tokens(self, text: str) -> int:
        """Input tokens of a text, for `usage`. Never touches the device."""
        ...

    def synthesize(self, utterance: Utterance, cancel: threading.Event) -> Generator[AudioChunk, None, None]:
        """Speak one piece; chunks are yielded as they are made.

        `cancel` is looked at in every decode step and before each vocoder call: raises Cancelled. Closing the
        generator stops the work too. Either way no thread of this request runs once the generator has ended.
        Raises UnknownVoice, InvalidInput, BackendUnavailable (not loaded), SynthesisFailed, Cancelled.
        """
        ...

    def add_voice(self, voice_id: str, name: str, audio: Samples, sample_rate: int, transcript: str) -> Voice:
        """Learn a voice from 1 to 30 s of mono audio (computes on the device). `transcript` may be "".

        Raises Unsupported where `can_clone` is false, InvalidInput (param "name", "file" or "transcript").
        """
        ...

    def delete_voice(self, voice_id: str) -> None:
        """Forget a voice made by `add_voice`. Raises UnknownVoice; Unsupported for a built-in one."""
        ...
