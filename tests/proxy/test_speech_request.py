import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.api import Voice
from backends.errors import BackendUnavailable, Cancelled, SynthesisFailed, Unsupported
from proxy.errors import BadRequest
from proxy.speech_request import SpeechRequest, SpeechSettings, as_proxy_error, choose_voice, openai_voices, parse

VOICES = [Voice("alba", "Alba"), Voice("me", "My voice", builtin=False)]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "input": "Hello.", **fields}).encode()


def refused(data: bytes, settings: SpeechSettings | None = None) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(data, settings or SpeechSettings())
    assert caught.value.status == 400
    return caught.value


def test_only_model_and_input_are_needed() -> None:
    assert parse(body(), SpeechSettings()) == SpeechRequest("m", "Hello.", None, "", "mp3", 1.0, "audio")


def test_every_field_is_read() -> None:
    fields = {
        "voice": {"id": "me"},
        "instructions": "Whisper.",
        "response_format": "wav",
        "speed": 2,
        "stream_format": "sse",
    }
    assert parse(body(**fields), SpeechSettings()) == SpeechRequest("m", "Hello.", "me", "Whisper.", "wav", 2.0, "sse")


def test_unknown_fields_are_ignored_and_null_is_absent() -> None:
    nothing = dict.fromkeys(["voice", "instructions", "response_format", "speed", "stream_format"])
    assert parse(body(lang="en", **nothing), SpeechSettings()) == parse(body(), SpeechSettings())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 1}, "model"),
        ({"model": ""}, "model"),
        ({"input": None}, "input"),
        ({"input": ["a"]}, "input"),
        ({"input": ""}, "input"),
        ({"input": "x" * 4097}, "input"),
        ({"input": "\ud800"}, "input"),
        ({"voice": 5}, "voice"),
        ({"voice": {}}, "voice"),
        ({"voice": {"id": 5}}, "voice"),
        ({"instructions": "x" * 4097}, "instructions"),
        ({"instructions": {}}, "instructions"),
        ({"response_format": "ogg"}, "response_format"),
        ({"response_format": 1}, "response_format"),
        ({"speed": 0.2}, "speed"),
        ({"speed": 4.1}, "speed"),
        ({"speed": "fast"}, "speed"),
        ({"speed": True}, "speed"),
        ({"speed": float("nan")}, "speed"),
        ({"stream_format": "opus"}, "stream_format"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert refused(body(**fields)).param == param


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe{}", b"[" * 100_000])
def test_what_is_not_a_json_object_is_refused(data: bytes) -> None:
    refused(data)


def test_the_limit_of_input_counts_characters_and_can_be_raised() -> None:
    text = "字" * 4096
    assert parse(body(input=text), SpeechSettings()).input == text
    assert parse(body(input=text * 2), SpeechSettings(max_input=10_000)).input == text * 2
    assert "1 to 3 characters" in refused(body(), SpeechSettings(max_input=3)).message


@given(st.binary(max_size=50))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(BadRequest):
        assert parse(data, SpeechSettings()).input


def test_without_a_voice_it_is_the_configured_one_else_the_first() -> None:
    assert choose_voice(None, VOICES, SpeechSettings()) == "alba"
    assert choose_voice(None, VOICES, SpeechSettings(voice="me")) == "me"


def test_openais_names_are_the_default_voice_unless_they_are_mapped() -> None:
    assert len(openai_voices()) == 13
    assert {choose_voice(name, VOICES, SpeechSettings()) for name in openai_voices()} == {"alba"}
    assert choose_voice("nova", VOICES, SpeechSettings(voices={"nova": "me"})) == "me"


def test_a_voice_goes_by_its_id_its_name_or_a_configured_name() -> None:
    assert choose_voice("me", VOICES, SpeechSettings()) == "me"
    assert choose_voice("My voice", VOICES, SpeechSettings()) == "me"
    assert choose_voice("narrator", VOICES, SpeechSettings(voices={"narrator": "me"})) == "me"


@pytest.mark.parametrize("asked", ["bella", "", "ALBA", "../me"])
def test_an_unknown_voice_is_refused_with_the_list(asked: str) -> None:
    with pytest.raises(BadRequest, match="voices: alba, me") as caught:
        choose_voice(asked, VOICES, SpeechSettings())
    assert caught.value.param == "voice"


def test_a_configured_voice_that_does_not_exist_is_not_replaced_in_silence() -> None:
    with pytest.raises(BadRequest, match="gone"):
        choose_voice(None, VOICES, SpeechSettings(voice="gone"))
    with pytest.raises(BadRequest):
        choose_voice("nova", VOICES, SpeechSettings(voices={"nova": "gone"}))


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (Unsupported("never", param="file"), 400, "file"),
        (BackendUnavailable("no weights"), 503, None),
        (SynthesisFailed("secret path"), 500, None),
        (Cancelled(), 503, None),
        (RuntimeError("secret path"), 500, None),
        (BadRequest("mine", param="x"), 400, "x"),
    ],
)
def test_a_backends_error_has_one_status(error: Exception, status: int, param: str | None) -> None:
    told = as_proxy_error(error)
    assert (told.status, told.param) == (status, param)
    assert "secret" not in told.message
