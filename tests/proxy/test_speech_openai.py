"""The real OpenAI client against the embedded voice, all six formats."""

import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from aiohttp.test_utils import TestServer
from openai import AsyncOpenAI, BadRequestError

from backends import create
from backends.api import SpeechBackend, Utterance
from tests.backends.readers import all_readers
from tests.proxy.speech_app import SpeechApp

Format = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
FORMATS: tuple[Format, ...] = ("mp3", "opus", "aac", "flac", "wav", "pcm")
TEXT = "The first sentence is here. And this is the second one, which is longer."
Connect = Callable[[], Awaitable[AsyncOpenAI]]


@pytest.fixture(scope="module")
def voice() -> Iterator[SpeechBackend]:
    backend = create("hibari", "voice", {}, Path())
    backend.load()
    yield backend
    backend.close()


@pytest.fixture
def connect(voice: SpeechBackend, aiohttp_server: Any) -> Connect:
    async def _connect() -> AsyncOpenAI:
        server: TestServer = await aiohttp_server(SpeechApp(voice).application())
        return AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)

    return _connect


def seconds(backend: SpeechBackend) -> float:
    chunks = [
        chunk.samples
        for piece in backend.split(TEXT)
        for chunk in backend.synthesize(Utterance(piece, "heart"), threading.Event())
    ]
    return float(np.concatenate(chunks).size / backend.sample_rate)


@pytest.mark.parametrize("format", FORMATS)
async def test_a_file_response_opens_everywhere(
    connect: Connect, voice: SpeechBackend, format: Format, tmp_path: Path
) -> None:
    async with await connect() as client:
        reply = await client.audio.speech.create(model="tts-1", voice="alloy", input=TEXT, response_format=format)
        file = tmp_path / f"speech.{format}"
        reply.write_to_file(file)
    for reader, (samples, rate) in all_readers(format, file.read_bytes()).items():
        assert samples.size / rate == pytest.approx(seconds(voice), abs=0.1), reader


@pytest.mark.parametrize("format", FORMATS)
async def test_a_streaming_response_opens_everywhere(connect: Connect, voice: SpeechBackend, format: Format) -> None:
    async with await connect() as client:
        create = client.audio.speech.with_streaming_response.create
        async with create(model="tts-1", voice="nova", input=TEXT, response_format=format, speed=2.0) as reply:
            data = b"".join([chunk async for chunk in reply.iter_bytes()])
    for reader, (samples, rate) in all_readers(format, data).items():
        assert samples.size / rate == pytest.approx(seconds(voice) / 2, rel=0.15), reader


async def test_an_unknown_voice_is_an_error_of_the_client_library(connect: Connect) -> None:
    async with await connect() as client:
        with pytest.raises(BadRequestError, match="voices: heart") as caught:
            await client.audio.speech.create(model="tts-1", voice="nobody", input=TEXT)
        assert caught.value.param == "voice"
