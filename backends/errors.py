"""What can go wrong in a speech backend, with no HTTP in it.

BackendError
├─ InvalidInput        the caller's fault: names the field (`param`) that is wrong
│  ├─ UnknownVoice     `param` is "voice"; lists the voices there are
│  └─ Unsupported      this backend can never do it (cloning a voice, say)
├─ BackendUnavailable  model files missing, truncated or of another model; a package missing
├─ SynthesisFailed     the model failed in the middle of an utterance
└─ Cancelled           the caller's cancel flag was seen; not a failure

The proxy maps each to an HTTP status in one place (proxy/errors.py).
"""

from collections.abc import Iterable


class BackendError(Exception):
    """Base of everything a backend raises on purpose."""


class InvalidInput(BackendError):
    """A request field that the backend cannot accept; `param` is the field's name."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class UnknownVoice(InvalidInput):
    """No voice of that id; the message lists those there are."""

    def __init__(self, voice: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown voice {voice!r}; voices: {', '.join(known)}", param="voice")


class Unsupported(InvalidInput):
    """Well-formed, but this backend cannot do it, now or later."""


class BackendUnavailable(BackendError):
    """The backend cannot run: the message says which file or package, and what would be right."""


class SynthesisFailed(BackendError):
    """The model failed while speaking; audio that was already yielded is incomplete."""


class Cancelled(BackendError):
    """The cancel flag was set; the work has stopped."""
