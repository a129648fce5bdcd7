"""Server-sent events, as far as a relay has to know them: keep-alives, errors, and whether a stream is complete.

Every shape here is what the OpenAI and Anthropic SDKs were seen to accept; docs/design.md has the reasons.
"""

import json
import re
import time
from collections.abc import Mapping
from typing import Literal

from proxy.errors import ProxyError

Protocol = Literal["openai", "anthropic"]
BeatKind = Literal["comment", "chunk", "ping", "space", "off"]


def headers() -> dict[str, str]:
    """The head of an event stream that no middle box holds back."""
    return {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def beat(kind: BeatKind, model: str = "") -> bytes:
    """One keep-alive. A comment has one line end: with a blank line behind it openai-python parses an empty event."""
    if kind == "ping":
        return b'event: ping\ndata: {"type": "ping"}\n\n'
    if kind == "chunk":
        chunk = {
            "id": "chatcmpl-waiting",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
            "choices": [{"index": 0, "delta": {}, "finish_reason": None}],
        }
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
    return b" " if kind == "space" else b": waiting for the GPU\n"


def error_event(error: ProxyError, protocol: Protocol) -> bytes:
    """An error inside an event stream, which makes the SDKs of that protocol raise."""
    if protocol == "anthropic":
        return b"event: error\ndata: " + json.dumps(error.anthropic_body()).encode() + b"\n\n"
    return b"data: " + json.dumps(error.body()).encode() + b"\n\n"


class EventScanner:
    """Passes an upstream's event stream on in whole lines and notices whether it came to its end.

    Bytes are looked at as they come, whatever they are cut into: what matters stands on one line, and a line ends with
    \\n or \\r only. JSON escapes the quotes and line ends of what a model writes, so text cannot pass for an ending.
    Half a line is of no use to a client and would spoil an error event behind it, so it waits for its other half.
    """

    _LONGEST_LINE = 1 << 20

    def __init__(self, path: str) -> None:
        """`path`: the normalised path of the request, which decides what the last event looks like."""
        self._pattern = _terminal_pattern(path)
        self._held = b""
        self._last = b""
        self.complete = self._pattern is None
        """The terminal event was seen, or none is known for this path."""
        self.appended = ""
        """What an error said that stood as bare JSON behind the events: llama-swap's way to say that a load failed."""

    def feed(self, data: bytes) -> bytes:
        """The next bytes from the upstream -> what can be sent now."""
        if self._held:
            data = self._held + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and len(data) > self._LONGEST_LINE:
            end = len(data)
        self._held = data[end:]
        return self._pass(data[:end])

    def rest(self) -> bytes:
        """After a clean end: the last line, where it had no line end and the stream is complete."""
        rest, self._held = self._held, b""
        if not self.complete and self._pattern is not None and self._pattern.search(rest) is None:
            self.appended = _error_message(rest)
            return b""
        return self._pass(rest)

    @property
    def separator(self) -> bytes:
        """What must go before an event of our own: ends an event that the upstream left open."""
        if not self._last or self._last.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")):
            return b""
        return b"\n\n" if self._last.endswith(b"\r") else b"\n"  # the first \n only completes a \r\n that was cut

    def _pass(self, data: bytes) -> bytes:
        if data:
            if not self.complete and self._pattern is not None:
                self.complete = self._pattern.search(data) is not None
            self._last = (self._last + data)[-4:] if len(data) < 4 else data[-4:]
        return data


_DONE = rb"(?:^|[\r\n])data:\s*\[DONE\]"
_CHAT_END = re.compile(_DONE + rb'|"finish_reason"\s*:\s*"[^"]')
_ENDS: Mapping[str, re.Pattern[bytes]] = {
    "/chat/completions": _CHAT_END,
    "/completions": _CHAT_END,
    "/messages": re.compile(rb'(?:^|[\r\n])event:\s*message_stop|"type"\s*:\s*"message_stop"'),
    "/responses": re.compile(_DONE + rb'|"type"\s*:\s*"response\.(?:completed|failed|incomplete)"'),
    "/audio/speech": re.compile(_DONE + rb'|"type"\s*:\s*"speech\.audio\.done"'),
    "/audio/transcriptions": re.compile(_DONE + rb'|"type"\s*:\s*"transcript\.text\.done"'),
}


def _terminal_pattern(path: str) -> re.Pattern[bytes] | None:
    match = re.fullmatch(r"(?:/upstream/.*)?/v1?(/.+)", path)
    return _ENDS.get(match[1]) if match else None


def _error_message(line: bytes) -> str:
    try:
        said = json.loads(line)["error"]
        return str(said["message"] if isinstance(said, dict) else said)
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
