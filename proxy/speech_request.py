"""What a client asked to be spoken: the fields of POST /v1/audio/speech, their rules, and the choice of a voice."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.api import Voice
from backends.audio import formats
from backends.errors import BackendUnavailable, Cancelled, InvalidInput
from proxy.errors import BadRequest, LeaseCancelled, ModelUnavailable, ProxyError

SLOWEST, FASTEST = 0.25, 4.0


@dataclass(frozen=True, slots=True)
class SpeechSettings:
    """The `speech` section of the configuration, as far as one request goes."""

    voice: str = ""
    """Id of the voice for requests that name none; "": the backend's first."""
    voices: Mapping[str, str] = field(default_factory=dict)
    """Names that clients use -> voice ids. OpenAI's own names that are not here mean `voice`."""
    max_input: int = 4096
    """Characters of `input`."""
    max_instructions: int = 4096
    heartbeat: float = 10.0
    """Seconds without a byte after which an event stream carries a comment."""
    stall: float = 600.0
    """Seconds for which a client may take no bytes at all before its connection is cut."""
    spool_memory: int = 1 << 20
    """Bytes of encoded audio that one answer keeps in memory for a slow client; more goes to a file."""
    spool_limit: int = 1 << 28
    """Bytes of encoded audio in that file, from which on the synthesis waits for the client."""


@dataclass(frozen=True, slots=True)
class JobSettings:
    """The part of the `speech` section that jobs need."""

    slice: float = 30.0
    """Seconds of audio that a job makes before it stands in line again."""
    ttl: float = 86400.0
    """Seconds for which an ended job and its audio are kept."""
    max_jobs: int = 100
    """Unfinished jobs of one key."""


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """The fields, each checked. `voice` is what the client wrote, None where it wrote nothing."""

    model: str
    input: str
    voice: str | None = None
    instructions: str = ""
    response_format: str = "mp3"
    speed: float = 1.0
    stream_format: str = "audio"


def openai_voices() -> tuple[str, ...]:
    """The names that every OpenAI client knows."""
    return (
        "alloy", "ash", "ballad", "coral", "echo", "fable", "onyx", "nova", "sage", "shimmer", "verse", "marin", "cedar",
    )  # fmt: skip


def parse(body: bytes, settings: SpeechSettings) -> SpeechRequest:
    """Read and check a request body. Raises BadRequest whose `param` is the field that is wrong.

    Unknown fields are ignored; null counts as absent.
    """
    fields = read_object(body)
    model = _string(fields, "model")
    if not model:
        raise BadRequest("model must not be empty", param="model")
    text = _string(fields, "input")
    if not 1 <= len(text) <= settings.max_input:
        raise BadRequest(f"input must have 1 to {settings.max_input} characters, not {len(text)}", param="input")
    instructions = _string(fields, "instructions", "")
    if len(instructions) > settings.max_instructions:
        raise BadRequest(
            f"instructions may have {settings.max_instructions} characters, not {len(instructions)}",
            param="instructions",
        )
    return SpeechRequest(
        model=model,
        input=text,
        voice=_voice(fields.get("voice")),
        instructions=instructions,
        response_format=_choice(fields, "response_format", formats()),
        speed=_speed(fields.get("speed")),
        stream_format=_choice(fields, "stream_format", ("audio", "sse")),
    )


def choose_voice(asked: str | None, voices: Sequence[Voice], settings: SpeechSettings) -> str:
    """The id of the voice to speak with.

    1. None: the configured default, else the backend's first.  2. A name that the configuration maps.
    3. A voice's id, then a voice's name.  4. One of OpenAI's names: the default.
    5. Else BadRequest, param "voice", with the list.
    """
    ids = [voice.id for voice in voices]
    default = settings.voice or next(iter(ids), "")
    if asked is None:  # (1)
        asked = default
    wanted = settings.voices.get(asked, asked)  # (2)
    if wanted in ids:  # (3)
        return wanted
    for voice in voices:
        if voice.name == wanted:
            return voice.id
    if asked in openai_voices() and asked not in settings.voices and default in ids:  # (4)
        return default
    message = f"unknown voice {asked!r}; voices: {', '.join(ids)}"  # (5)
    raise BadRequest(message, param="voice", code="unknown_voice")


def as_proxy_error(error: BaseException) -> ProxyError:
    """A backend's error as what the client is told; anything unexpected is a 500 that tells no secrets."""
    match error:
        case ProxyError():
            return error
        case InvalidInput():
            return BadRequest(str(error), param=error.param)
        case BackendUnavailable():
            return ModelUnavailable(str(error))
        case Cancelled():
            return LeaseCancelled("the synthesis was cancelled")
        case _:
            return ProxyError("the synthesis failed; the server's log says why", code="synthesis_failed")


def read_object(body: bytes) -> dict[str, Any]:
    """A body that must be a JSON object. Raises BadRequest."""
    try:
        fields = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadRequest("the body must be a JSON object")
    return fields


def _string(fields: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = fields.get(key)
    if value is None:
        if default is None:
            raise BadRequest(f"{key} is required", param=key)
        return default
    if not isinstance(value, str):
        raise BadRequest(f"{key} must be a string", param=key)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # "\ud800" is valid JSON, but no character
        raise BadRequest(f"{key} has half of a surrogate pair at character {error.start}", param=key) from error
    return value


def _choice(fields: Mapping[str, Any], key: str, choices: Sequence[str]) -> str:
    value = _string(fields, key, choices[0])
    if value not in choices:
        raise BadRequest(f"{key} must be one of {', '.join(choices)}, not {value!r}", param=key)
    return value


def _voice(value: Any) -> str | None:
    if isinstance(value, dict):
        return _string({"voice": value.get("id")}, "voice")
    return None if value is None else _string({"voice": value}, "voice")


def _speed(value: Any) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRequest("speed must be a number", param="speed")
    if not SLOWEST <= value <= FASTEST:
        raise BadRequest(f"speed must be from {SLOWEST} to {FASTEST}, not {value}", param="speed")
    return float(value)
