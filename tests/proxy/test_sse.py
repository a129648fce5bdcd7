import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy import sse
from proxy.errors import UpstreamTruncated
from proxy.sse import EventScanner

CHAT = "/v1/chat/completions"


def chunk(content: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    return b"data: " + json.dumps({"object": "chat.completion.chunk", "choices": [choice]}).encode() + b"\n\n"


def scan(path: str, *pieces: bytes) -> tuple[bytes, EventScanner]:
    """What goes on to the client, with the last line after a clean end."""
    scanner = EventScanner(path)
    sent = b"".join(map(scanner.feed, pieces))
    return sent + scanner.rest(), scanner


@st.composite
def cuts(draw: st.DrawFn, data: bytes) -> Sequence[bytes]:
    places = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


# Endings


ENDINGS = [
    (CHAT, b"data: [DONE]\n\n"),
    (CHAT, b"data:[DONE]\r\n\r\n"),
    (CHAT, b"data: [DONE]"),
    (CHAT, chunk("", "stop")),
    (CHAT, chunk("", "stop").rstrip()),
    (CHAT, b'data: {"choices":[{"finish_reason" : "length"}]}\r\r'),
    ("/v/chat/completions", b"data: [DONE]\n\n"),
    ("/v1/completions", b"data: [DONE]\n\n"),
    ("/v1/messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
    ("/v/messages", b'data: {"type": "message_stop"}\n\n'),
    ("/v1/responses", b'event: response.completed\ndata: {"type":"response.completed"}\n\n'),
    ("/v1/responses", b'data: {"type": "response.failed"}\n\n'),
    ("/v1/responses", b'data: {"type": "response.incomplete"}\n\n'),
    ("/v1/audio/speech", b'data: {"type":"speech.audio.done"}\n\n'),
    ("/v1/audio/transcriptions", b'data: {"type":"transcript.text.done"}\n\n'),
    ("/upstream/org/m/v1/chat/completions", b"data: [DONE]\n\n"),
    ("/upstream/m/v1/messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
]


@pytest.mark.parametrize(("path", "ending"), ENDINGS)
def test_a_terminal_event_completes_a_stream(path: str, ending: bytes) -> None:
    begun = chunk("é\u2028 hello")
    assert not scan(path, begun)[1].complete
    sent, scanner = scan(path, begun, ending)
    assert scanner.complete
    assert sent == begun + ending


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_terminal_event_is_found_however_the_bytes_are_cut(data: st.DataObject) -> None:
    path, ending = data.draw(st.sampled_from(ENDINGS))
    whole = chunk("日本\u2028\x85") + b": comment\n" + chunk("é") + ending
    sent, scanner = scan(path, *data.draw(cuts(whole)))
    assert scanner.complete
    assert sent == whole


UNFINISHED = [
    chunk("data: [DONE]"),
    chunk("\ndata: [DONE]\n\n"),
    chunk("\rdata: [DONE]\r"),
    chunk("\u2028data: [DONE]\u2028"),
    chunk('{"finish_reason": "stop"}'),
    chunk('"finish_reason":"stop"'),
    chunk('{"type": "message_stop"}'),
    chunk("event: message_stop"),
    chunk("", ""),
    b": data: [DONE]\n\n",
    b"event: [DONE]\n\n",
    b"data: [DON\n\n",
    b'data: {"finish_reason": null}\n\n',
]


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/v1/completions"])
@pytest.mark.parametrize("unfinished", UNFINISHED)
def test_what_a_model_writes_cannot_pass_for_an_ending(path: str, unfinished: bytes) -> None:
    assert not scan(path, unfinished)[1].complete


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_no_cut_makes_an_ending_of_what_is_none(data: st.DataObject) -> None:
    whole = b"".join(data.draw(st.lists(st.sampled_from(UNFINISHED), min_size=1, max_size=3)))
    sent, scanner = scan(CHAT, *data.draw(cuts(whole)))
    assert not scanner.complete
    assert sent == whole


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=40), st.data())
def test_no_content_at_all_makes_an_ending(content: str, data: st.DataObject) -> None:
    whole = chunk(content)
    sent, scanner = scan(CHAT, *data.draw(cuts(whole)))
    assert (sent, scanner.complete) == (whole, False)


@pytest.mark.parametrize("path", ["/api/events", "/logs/stream", "/v1/unheard-of", "/completion", "/"])
def test_where_no_ending_is_known_every_stream_is_complete(path: str) -> None:
    sent, scanner = scan(path, b"data: x\n\n", b"half a li")
    assert (sent, scanner.complete) == (b"data: x\n\nhalf a li", True)


# Whole lines


def test_half_a_line_waits_for_its_other_half() -> None:
    scanner = EventScanner(CHAT)
    assert scanner.feed(b"data: 1\n\ndata: {") == b"data: 1\n\n"
    assert scanner.feed(b'"a"') == b""
    assert scanner.feed(b": 1}\n") == b'data: {"a": 1}\n'


def test_half_a_line_at_the_end_of_a_broken_stream_is_left_out() -> None:
    assert scan(CHAT, chunk("a"), b'data: {"choi')[0] == chunk("a")


def test_an_error_that_was_appended_as_bare_json_is_told() -> None:
    sent, scanner = scan(CHAT, chunk("a"), b'{"error": {"message": "load failed", "type": "server_error"}}')
    assert (sent, scanner.complete, scanner.appended) == (chunk("a"), False, "load failed")


@pytest.mark.parametrize("rest", [b"", b"{", b"[]", b'"error"', b'{"error": 1', b"data: {", b"\xff", b"[" * 100_000])
def test_what_is_no_appended_error_tells_nothing(rest: bytes) -> None:
    assert scan(CHAT, chunk("a"), rest)[1].appended == ""


def test_a_line_without_end_is_not_kept_for_ever() -> None:
    scanner = EventScanner(CHAT)
    line = b"data: " + b"x" * (1 << 20)
    sent = b"".join(scanner.feed(line[at : at + 65536]) for at in range(0, len(line), 65536))
    assert len(sent) > 1 << 19


# Errors and keep-alives


@pytest.mark.parametrize(
    ("before", "separator"),
    [(b"", b""), (b"data: 1\n\n", b""), (b"data: 1\r\n\r\n", b""), (b"data: 1\r\r", b""), (b"data: 1\n", b"\n"),
     (b"data: 1\r", b"\n\n"),
     (b"data: 1\r\n", b"\n"), (b"event: x\n", b"\n")],
)  # fmt: skip
def test_an_event_that_was_left_open_is_closed_before_ours(before: bytes, separator: bytes) -> None:
    for cut in range(len(before) + 1):
        _, scanner = scan(CHAT, before[:cut], before[cut:])
        assert scanner.separator == separator


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_wherever_a_stream_breaks_off_the_error_is_an_event_of_its_own(end: bytes) -> None:
    whole = b"".join(chunk(text).replace(b"\n", end) for text in ("é", "\u2028")) + b"event: x" + end
    for length in range(len(whole) + 1):
        sent, scanner = scan(CHAT, whole[:length])
        stream = sent + scanner.separator + sse.error_event(UpstreamTruncated("broke off"), "openai")
        *before, last = events(stream)
        assert json.loads(last["data"]) == UpstreamTruncated("broke off").body()
        assert all(json.loads(event["data"]) for event in before if "data" in event)


def events(stream: bytes) -> list[dict[str, str]]:
    """By the standard: the data lines of an event are joined, and an event without a blank line is none."""
    found: list[dict[str, str]] = []
    event: dict[str, str] = {}
    for line in stream.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if not line:
            found += [event] if event else []
            event = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            event[name] = f"{event[name]}\n{value}" if name in event else value.removeprefix(" ")
    return found


def test_an_error_has_the_shape_of_its_protocol() -> None:
    error = UpstreamTruncated("broke off")
    assert sse.error_event(error, "openai") == b"data: " + json.dumps(error.body()).encode() + b"\n\n"
    [event] = events(sse.error_event(error, "anthropic"))
    assert event["event"] == "error"
    assert json.loads(event["data"]) == {"type": "error", "error": {"type": "api_error", "message": "broke off"}}


def test_a_comment_has_one_line_end_and_no_event_is_empty() -> None:
    assert sse.beat("comment") == b": waiting for the GPU\n"
    assert events(sse.beat("comment") * 3) == []


def test_a_ping_is_anthropics_own() -> None:
    assert sse.beat("ping") == b'event: ping\ndata: {"type": "ping"}\n\n'


def test_a_chunk_says_nothing() -> None:
    [event] = events(sse.beat("chunk", "m"))
    said = json.loads(event["data"])
    assert (said["object"], said["model"]) == ("chat.completion.chunk", "m")
    assert said["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}]
    assert not scan(CHAT, sse.beat("chunk", "m"))[1].complete


def test_the_head_of_a_stream_keeps_middle_boxes_from_holding_it_back() -> None:
    headers = sse.headers()
    assert headers["Content-Type"].startswith("text/event-stream")
    assert (headers["X-Accel-Buffering"], headers["Cache-Control"]) == ("no", "no-cache")
