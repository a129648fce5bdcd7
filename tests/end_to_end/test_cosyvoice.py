"""CosyVoice behind the whole proxy, on the tiny model: HTTP, lease, tokens, chunks, audio.

Where a test needs to stop time it gates the language model; nothing depends on how long anything takes.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import yaml
from aiohttp import web
from openai import AsyncOpenAI

import backends
from backends.cosyvoice.backend import CosyVoice
from backends.cosyvoice.checkpoint import load_vocoder
from backends.cosyvoice.options import CosyVoiceOptions
from backends.cosyvoice.speech_lm import open_speech_lm
from proxy import check
from proxy import config as configuration
from proxy.app import RUNTIME, build_app, server_options
from proxy.config import Config
from proxy.errors import ConfigError
from proxy.runtime import create_backends
from tests.backends.cosyvoice.doubles import Gate, Wrapped, WrappedVocoder
from tests.backends.readers import all_readers
from tests.tiny_cosyvoice import DATA, build

TEXT = "Hello there, this is the thing."
LONG = "This text has to be long enough for more than one hop of the schedule."
MODES = {
    "zero_shot": {"voice": "anna"},
    "cross_lingual": {"voice": "bea"},
    "instruct2": {"voice": "anna", "instructions": "Please whisper."},
}
SPEECH = "/v1/audio/speech"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the voices anna, whose transcript is known, and bea."""
    folder: Path = tmp_path_factory.mktemp("data")
    backend = backends.create("cosyvoice", "cv", options(model), folder)
    with np.load(DATA / "golden/g_frontend.npz") as frontend:
        recording = frontend["wave_24k"]
    backend.add_voice("anna", "Anna", recording, 24000, "the words of the prompt")
    backend.add_voice("bea", "Bea", recording[:30000], 24000, "")
    return folder


def options(model: Path, **more: Any) -> dict[str, Any]:
    return {"model_dir": str(model), "device": "cpu", "threads": 1, "context": 2048, "seed": 4, **more}


@dataclass
class Running:
    """A proxy with the tiny model. `lm`: the language model that is loaded, once there is one."""

    client: aiohttp.ClientSession
    url: str
    lms: list[Wrapped]

    @property
    def lm(self) -> Wrapped:
        return self.lms[-1]

    async def speak(self, text: str = TEXT, format: str = "pcm", **more: Any) -> bytes:
        body = {"model": "cosyvoice", "input": text, "voice": "anna", "response_format": format, **more}
        async with self.client.post(SPEECH, json=body) as reply:
            assert reply.status == 200, await reply.text()
            return await reply.read()

    async def free(self) -> None:
        """Wait until nobody holds or waits for the lease."""
        async with asyncio.timeout(60):
            while True:
                async with self.client.get("/lease") as reply:
                    leases = (await reply.json())["leases"].values()
                if not any(lease["holders"] or lease["waiting"] for lease in leases):
                    return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(
    model: Path,
    data: Path,
    before: Callable[[int], None] = lambda token: None,
    before_audio: Callable[[], None] = lambda: None,
    **more: Any,
) -> AsyncIterator[Running]:
    """`before(n)` is called before token n of each generation, in the thread that makes it; `before_audio()` before
    each call of the vocoder."""
    lms: list[Wrapped] = []

    def open_lm(path: Path, **arguments: Any) -> Wrapped:
        lms.append(Wrapped(open_speech_lm(path, **arguments), before))
        return lms[-1]

    def open_vocoder(path: Path, **arguments: Any) -> Any:
        return WrappedVocoder(load_vocoder(path, **arguments), before_audio)

    given = options(model, **more)
    config = Config.model_validate(
        {
            "data_dir": str(data),
            "backends": {"cv": {"kind": "cosyvoice", "options": given}},
            "groups": {"speech": {"mode": "write", "models": ["cosyvoice"], "backend": "cv"}},
        }
    )
    app = build_app(config)
    app[RUNTIME].backends["cv"] = CosyVoice(
        "cv", CosyVoiceOptions.model_validate(given), data, open_lm=open_lm, open_vocoder=open_vocoder
    )
    runner = web.AppRunner(app, shutdown_timeout=0.1, **server_options())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        async with aiohttp.ClientSession(f"http://{host}:{port}") as client:
            yield Running(client, f"http://{host}:{port}", lms)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("streaming", [True, False])
async def test_each_mode_gives_a_file_that_others_can_read(model: Path, data: Path, streaming: bool) -> None:
    async with running(model, data, streaming=streaming) as proxy:
        for name, choice in MODES.items():
            samples = len(await proxy.speak(**choice)) / 2
            content = await proxy.speak(format="flac", **choice)
            for reader, (audio, rate) in all_readers("flac", content).items():
                assert (audio.size, rate) == (samples, 24000), (name, reader)
                assert abs(audio).max() > 0.01
        await proxy.free()


async def test_the_openai_client_streams_it(model: Path, data: Path) -> None:
    async with (
        running(model, data) as proxy,
        AsyncOpenAI(base_url=proxy.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.audio.speech.with_streaming_response.create
        async with stream(model="cosyvoice", voice="anna", input=TEXT, response_format="pcm") as reply:
            assert b"".join([chunk async for chunk in reply.iter_bytes()]) == await proxy.speak()


async def test_the_first_audio_is_sent_before_the_last_token_is_made(model: Path, data: Path) -> None:
    gate = Gate()
    async with running(model, data, lambda token: gate.wait() if token == 50 else None) as proxy:
        body = {"model": "cosyvoice", "input": LONG, "voice": "anna", "response_format": "pcm"}
        async with proxy.client.post(SPEECH, json=body) as reply:
            first = await reply.content.readany()
            assert first
            assert proxy.lm.events == ["warmed", "began 1"]
            gate.open()
            assert await reply.content.read()
        assert proxy.lm.events == ["warmed", "began 1", "ended 1"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("token", [0, 5, 45], ids=["prefill", "decoding", "after the first audio"])
async def test_a_client_who_goes_stops_the_work_and_the_next_begins_when_its_thread_has_ended(
    model: Path, data: Path, mode: str, token: int
) -> None:
    """Before the given token the language model stops until the request has been cancelled: a slow step."""
    gate = Gate()
    seen: list[int] = []

    def before(number: int) -> None:
        if len(proxy.lm.events) == 2:  # warmed, began 1
            seen.append(number)
            if number == token:
                gate.wait()
                proxy.lm.until_stopped()

    async with running(model, data, before) as proxy:
        body = {"model": "cosyvoice", "input": LONG, "response_format": "pcm", **MODES[mode]}
        gone = asyncio.create_task(proxy.client.post(SPEECH, json=body))
        await asyncio.to_thread(gate.reached)
        following = asyncio.create_task(proxy.speak(**MODES[mode]))
        gate.open()
        if token == 45:
            reply = await gone  # the first audio has come
            await reply.content.readany()
            reply.close()
        gone.cancel()
        assert await following
        assert seen == list(range(token + 1))
        assert proxy.lm.events == ["warmed", "began 1", "ended 1", "began 2", "ended 2"]
        await asyncio.gather(gone, return_exceptions=True)
        await proxy.free()
    assert not [thread for thread in threading.enumerate() if thread.name == "speech tokens"]


@pytest.mark.parametrize(
    ("streaming", "call"), [(True, 1), (True, 2), (False, 1)], ids=["first audio", "later audio", "all at once"]
)
async def test_a_client_who_goes_while_the_vocoder_works_stops_the_work_behind_this_call(
    model: Path, data: Path, streaming: bool, call: int
) -> None:
    """The given call of the vocoder goes on until the request has been cancelled: a slow one."""
    gate = Gate()
    calls = 0

    def before_audio() -> None:
        nonlocal calls
        if proxy.lms and "began 1" in proxy.lm.events and "began 2" not in proxy.lm.events:
            calls += 1
            if calls == call:
                gate.wait()
                proxy.lm.until_stopped()

    async with running(model, data, before_audio=before_audio, streaming=streaming) as proxy:
        body = {"model": "cosyvoice", "input": f"{LONG} {LONG}", "voice": "anna", "response_format": "pcm"}
        gone = asyncio.create_task(proxy.client.post(SPEECH, json=body))
        await asyncio.to_thread(gate.reached)
        following = asyncio.create_task(proxy.speak())
        gate.open()
        if call == 2:
            reply = await gone  # the first audio has come
            assert await reply.content.readany()
            reply.close()
        gone.cancel()
        assert await following
        assert calls == call
        assert proxy.lm.events == ["warmed", "began 1", "ended 1", "began 2", "ended 2"]
        await asyncio.gather(gone, return_exceptions=True)
        await proxy.free()
        assert await proxy.speak()
    assert not [thread for thread in threading.enumerate() if thread.name == "speech tokens"]


async def test_a_failure_before_the_first_audio_is_an_error_object(model: Path, data: Path) -> None:
    def before(token: int) -> None:
        if token == 3:
            raise OSError("the card fell out")

    async with running(model, data, before) as proxy:
        body = {"model": "cosyvoice", "input": TEXT, "voice": "anna"}
        async with proxy.client.post(SPEECH, json=body) as reply:
            assert reply.status == 500
            assert set((await reply.json())["error"]) == {"message", "type", "param", "code"}
        await proxy.free()


async def test_a_failure_after_it_breaks_the_stream_and_is_no_short_success(model: Path, data: Path) -> None:
    broken = [True]

    def before(token: int) -> None:
        if token == 45 and broken:
            raise OSError("the card fell out")

    async with running(model, data, before) as proxy:
        body = {"model": "cosyvoice", "input": LONG, "voice": "anna", "response_format": "pcm"}
        async with proxy.client.post(SPEECH, json=body) as reply:
            assert reply.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await reply.read()
        broken.clear()
        assert await proxy.speak()
        await proxy.free()


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": "... ?!"}, "input"),
        ({"voice": "nobody"}, "voice"),
        ({"instructions": "shout " * 600}, "instructions"),
    ],
)
async def test_what_cannot_be_spoken_names_the_field_and_leaves_the_lease_free(
    model: Path, data: Path, more: dict[str, str], param: str
) -> None:
    async with running(model, data) as proxy:
        body = {"model": "cosyvoice", "input": TEXT, "voice": "anna", **more}
        async with proxy.client.post(SPEECH, json=body) as reply:
            assert reply.status == 400
            assert (await reply.json())["error"]["param"] == param
        await proxy.free()


@pytest.fixture
def beside(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """Reads a configuration beside which the model lies in models/tiny; the process works in another folder."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models/tiny").symlink_to(model)
    monkeypatch.chdir(tmp_path / "elsewhere")

    def read(**given: str) -> Config:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({"backends": {"cv": {"kind": "cosyvoice", "options": options(model, **given)}}}))
        return configuration.load(path)

    return read


def test_paths_among_the_options_begin_at_the_configuration_file(beside: Callable[..., Config]) -> None:
    config = beside(model_dir="models/tiny", llm="models/tiny/cosyvoice3-speech-f16.gguf")
    [backend] = create_backends(config).values()
    backend.load()
    assert backend.loaded
    backend.close()


@pytest.mark.parametrize(("option", "kind"), [("model_dir", "folder"), ("llm", "file")])
async def test_a_path_that_leads_nowhere_is_told_in_full_with_its_option(
    beside: Callable[..., Config], tmp_path: Path, option: str, kind: str
) -> None:
    with pytest.raises(ConfigError, match=rf"backends\.cv\.{option}: .*there is no {kind} {tmp_path}/models/none"):
        await check.overview(beside(**{option: "models/none"}))


@pytest.fixture
def incomplete(model: Path, tmp_path: Path) -> Path:
    """The model without flow.pt."""
    for path in model.iterdir():
        if path.name != "flow.pt":
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


async def test_a_missing_model_file_is_named_and_leaves_the_lease_free(incomplete: Path, data: Path) -> None:
    async with running(incomplete, data) as proxy:
        body = {"model": "cosyvoice", "input": TEXT, "voice": "anna"}
        async with proxy.client.post(SPEECH, json=body) as reply:
            assert reply.status == 503
            assert "flow.pt" in (await reply.json())["error"]["message"]
        await proxy.free()
