import asyncio
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.audio import Encoder, to_pcm, wav_header
from backends.decode import read_audio
from proxy.errors import BadRequest
from proxy.upstream_voices import read_voices
from proxy.voices import check_name, voice_id
from tests.fakes import FakeModel, FakeSpeech, FakeSwapper
from tests.proxy.speech_server import SpeechServer, speech_server


def recording(seconds: float = 2.0, format: str = "wav") -> bytes:
    audio = (0.3 * np.sin(np.arange(round(seconds * 24000)) / 20)).astype(np.float32)
    if format == "wav":
        pcm = to_pcm(audio)
        return wav_header(len(pcm)) + pcm
    encoder = Encoder(format, 24000)
    return encoder.encode(audio) + encoder.finish()


def form(file: bytes | None = None, *, part: str = "file", **fields: str) -> aiohttp.FormData:
    data = aiohttp.FormData()
    for name, value in fields.items():
        data.add_field(name, value)
    data.add_field(
        part, io.BytesIO(recording() if file is None else file), filename="../../etc/passwd", content_type="audio/wav"
    )
    return data


async def refused(server: SpeechServer, data: Any) -> tuple[int, str]:
    status, error = await server.error("POST", "/v1/audio/voices", data=data)
    assert await server.lease_is_free()
    return status, error["param"]


# -- lists ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/audio/voices", "/audio/voices", "/voices", "/v1/voices", "//v1/audio/voices/"])
async def test_every_list_has_what_each_client_parses(path: str, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        listed = await server.json("GET", server.url + path)
        alba = {"id": "alba", "object": "audio.voice", "name": "Alba", "created_at": 0}
        assert listed["object"] == "list"
        assert listed["data"][0] == alba | {"model": "tts", "owned_by": "llama-lease:fake"}
        assert {voice["id"]: voice["name"] for voice in listed["voices"]}["alba"] == "Alba"  # Open WebUI
        legacy = await server.json("GET", server.url + path + "?legacy=true")
        assert legacy["voices"] == ["alba", "bruno"]


async def test_voices_of_an_upstream_are_merged_in_and_tell_where_they_are_from(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        listed = (await server.json("GET", "/v1/audio/voices"))["data"]
        assert [(entry["id"], entry["model"], entry["owned_by"]) for entry in listed] == [
            ("alba", "tts", "llama-lease:fake"),
            ("bruno", "tts", "llama-lease:fake"),
            ("alba", "chatter", "swapper"),
            ("bruno", "chatter", "swapper"),
        ]
        await server.json("GET", "/v1/audio/voices")
        assert [request.path for request in server.swapper.requests] == ["/v1/audio/voices?model=chatter"]


async def test_a_list_does_not_wait_for_an_upstream_that_must_wait_for_the_gpu(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        gate = server.swapper.hold("qwen", after=1)
        chat = {"model": "qwen", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        async with server.client.post("/v1/chat/completions", json=chat) as reply:
            async with server.client.get("/v1/audio/voices") as listed:
                assert listed.headers["X-Unavailable-Models"] == "chatter"
                assert [entry["model"] for entry in (await listed.json())["data"]] == ["tts", "tts"]
            gate.open()
            await reply.read()
        models: list[str] = []
        while "chatter" not in models:  # it was asked once the chat was over
            models = [entry["model"] for entry in (await server.json("GET", "/v1/audio/voices"))["data"]]


async def test_a_models_own_voices_are_listed_alone(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        local = await server.json("GET", "/v1/audio/voices?model=tts-1")
        assert [entry["id"] for entry in local["data"]] == ["alba", "bruno"]
        assert not server.swapper.requests
        assert await server.json("GET", "/v1/audio/voices?model=chatter") == {"voices": ["alba", "bruno"]}


async def test_local_voices_need_no_lease(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        gate = server.speech.hold()
        speech = {"model": "tts", "input": "Hello.", "response_format": "pcm"}
        speaking = asyncio.create_task(server.json("GET", "/v1/audio/voices?model=tts"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_read(server, speech))
            await asyncio.to_thread(gate.reached.wait, 30)
            assert (await speaking)["data"]
            gate.open()


async def _read(server: SpeechServer, speech: dict[str, str]) -> None:
    async with server.client.post("/v1/audio/speech", json=speech) as reply:
        assert await reply.read()


@pytest.mark.parametrize("path", ["/v1/audio/models", "/audio/models"])
async def test_speech_models_are_listed_for_open_webui(path: str, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        listed = await server.json("GET", path)
        assert [model["id"] for model in listed["models"]] == ["tts", "tts-again", "chatter"]
        assert [model["owned_by"] for model in listed["data"]] == ["llama-lease:fake"] * 2 + ["swapper"]


# -- new voices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["wav", "mp3", "opus", "flac", "aac"])
async def test_a_recording_becomes_a_voice_that_can_be_spoken_with(format: str, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        data = form(recording(2.0, format), name="Zoë Smith", transcript="Hello.")
        voice = await server.json("POST", "/v1/audio/voices", data=data)
        assert voice["id"] == "zoe-smith"
        assert voice["name"] == "Zoë Smith"
        assert voice["created_at"] > 0
        for name in ("zoe-smith", "Zoë Smith"):
            speech = {"model": "tts", "voice": name, "input": "Hi.", "response_format": "pcm"}
            async with server.client.post("/v1/audio/speech", json=speech) as reply:
                assert reply.status == 200
                assert await reply.read()
        assert await server.lease_is_free()


async def test_a_new_voice_takes_the_write_lease(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        gate = server.swapper.hold("qwen", after=1)
        chat = {"model": "qwen", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        async with server.client.post("/v1/chat/completions", json=chat) as reply:
            adding = asyncio.create_task(server.json("POST", "/v1/audio/voices", data=form(name="me")))
            waiting: list[dict[str, Any]] = []
            while not waiting:
                waiting = (await server.json("GET", "/lease"))["leases"]["gpu0"]["waiting"]
            assert [(entry["model"], entry["mode"]) for entry in waiting] == [("tts", "write")]
            assert "me" not in [voice.id for voice in server.speech.voices()]
            gate.open()
            await reply.read()
        assert (await adding)["id"] == "me"


async def test_both_names_of_the_fields_are_read(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        data = form(part="audio_sample", name="me", ref_text="Hello.", model="tts", consent="yes")
        assert (await server.json("POST", "/v1/audio/voices", data=data))["id"] == "me"


@pytest.mark.parametrize(
    ("fields", "file", "param"),
    [
        ({}, None, "name"),
        ({"name": "x" * 65}, None, "name"),
        ({"name": "a\nb"}, None, "name"),
        ({"name": "Alba"}, None, "name"),
        ({"name": "me"}, b"", "file"),
        ({"name": "me"}, b"not audio at all", "file"),
        ({"name": "me"}, wav_header(None), "file"),
        ({"name": "me"}, 0.9, "file"),
        ({"name": "me"}, 30.1, "file"),
        ({"name": "me", "transcript": "x" * 4097}, None, "transcript"),
        ({"name": "me", "model": "nothing"}, None, "model"),
    ],
)
async def test_a_bad_upload_names_its_field_and_takes_no_lease(
    fields: dict[str, str], file: bytes | float | None, param: str, tmp_path: Path
) -> None:
    data = recording(file) if isinstance(file, float) else file
    async with speech_server(tmp_path) as server:
        status, named = await refused(server, form(data, **fields))
        assert (status in (400, 404), named) == (True, param)


async def test_a_recording_over_the_limit_is_413(tmp_path: Path) -> None:
    async with speech_server(tmp_path, speech={"max_upload": 1000}) as server:
        assert await refused(server, form(name="me")) == (413, "file")


async def test_a_form_that_breaks_off_is_refused(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        head = {"Content-Type": "multipart/form-data; boundary=b"}
        body = b'--b\r\nContent-Disposition: form-data; name="name"\r\n\r\nme'
        status, error = await server.error("POST", "/v1/audio/voices", data=body, headers=head)
        assert (status, error["param"]) == (400, "body")


async def test_a_backend_that_cannot_clone_says_so(tmp_path: Path) -> None:
    async with speech_server(tmp_path, FakeSpeech(can_clone=False)) as server:
        status, error = await server.error("POST", "/v1/audio/voices", data=form(name="me"))
        assert (status, error["code"]) == (400, "unsupported")
        assert "cannot learn voices" in error["message"]


async def test_a_voice_made_here_can_be_deleted_and_a_built_in_one_stays(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        await server.json("POST", "/v1/audio/voices", data=form(name="me"))
        assert (await server.json("DELETE", "/v1/audio/voices/me"))["deleted"]
        for id, status in (("me", 404), ("alba", 400), ("..%2F..%2Fetc", 404)):
            assert (await server.error("DELETE", f"/v1/audio/voices/{id}"))[0] == status
        assert "me" not in [voice.id for voice in server.speech.voices()]


async def test_an_upstreams_own_voice_call_goes_to_it_under_the_lease(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        body = {"model": "far", "name": "me"}
        await server.json("POST", "/v1/audio/voices", json=body)
        received = server.swapper.requests[-1]
        assert (received.method, received.path) == ("POST", "/v1/audio/voices")
        assert json.loads(received.body) == {"model": "chatter", "name": "me"}


async def test_other_ways_to_manage_voices_reach_the_upstream(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        async with server.client.post("/voices", data=b"{}") as reply:
            await reply.read()
        assert server.swapper.requests[-1].path == "/voices"


# -- rules ---------------------------------------------------------------------------------------------------------


@given(st.text(min_size=1, max_size=64))
def test_an_id_has_no_path_in_it(name: str) -> None:
    id = voice_id(name)
    assert 1 <= len(id) <= 64
    assert set(id) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-")
    assert voice_id(id) == id


def test_names_in_other_scripts_get_ids_of_their_own() -> None:
    assert voice_id("小明") != voice_id("小红")
    assert check_name("小明") == "小明"
    for bad in ("", "x" * 65, "a\x00b"):
        with pytest.raises(BadRequest):
            check_name(bad)


@pytest.mark.parametrize(
    ("answer", "ids"),
    [
        (b'{"voices": ["a", "b"]}', ["a", "b"]),
        (b'{"voices": [{"id": "a", "name": "A"}, {"name": "b"}, {"voice_id": "c"}]}', ["a", "b", "c"]),
        (b'{"object": "list", "data": [{"id": "a", "created_at": 5}]}', ["a"]),
        (b'["a", "a", 5, {}]', ["a"]),
        (b'{"voices": {"a": {}, "b": {}}}', ["a", "b"]),
        (b"not json", []),
        (b"5", []),
    ],
)
def test_voices_of_other_servers_are_read_in_their_shapes(answer: bytes, ids: list[str]) -> None:
    assert [voice.id for voice in read_voices(answer)] == ids


async def test_an_upstream_that_fails_is_not_asked_again_at_once(tmp_path: Path) -> None:
    swapper = FakeSwapper({"qwen": FakeModel(), "other": FakeModel()})  # it does not know "chatter"
    async with speech_server(tmp_path, swapper=swapper) as server:
        for _ in range(3):
            async with server.client.get("/v1/audio/voices") as reply:
                assert reply.headers["X-Unavailable-Models"] == "chatter"
        assert len(server.swapper.requests) == 1


# -- audio in ------------------------------------------------------------------------------------------------------


def test_channels_are_mixed_to_one() -> None:
    import wave

    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(2)
        out.setsampwidth(2)
        out.setframerate(44100)
        out.writeframes(np.array([[1000, 3000]] * 44100, "<i2").tobytes())
    samples, rate = read_audio(file.getvalue(), longest=30)
    assert rate == 44100
    assert samples.shape == (44100,)
    assert samples == pytest.approx(2000 / 32768)


@pytest.mark.parametrize(
    "text",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:2.0,\nfile://{path}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile {path}\n",
    ],
)
def test_a_list_that_names_files_of_this_machine_is_not_audio(text: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.wav"
    secret.write_bytes(recording())
    with pytest.raises(Exception, match="not audio"):
        read_audio(text.format(path=secret).encode(), longest=30)


def test_decoding_stops_at_the_limit() -> None:
    with pytest.raises(Exception, match="longer than 5 s"):
        read_audio(recording(600, "flac"), longest=5)
