"""Speech on a real server process with the embedded voice; chat comes from a fake swapper in this process."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
import yaml
from openai import AsyncOpenAI, OpenAI

from tests.backends.readers import all_readers
from tests.embedded import Server, free_ports
from tests.fakes import FakeModel, FakeSwapper

Format = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
FORMATS: tuple[Format, ...] = ("mp3", "opus", "aac", "flac", "wav", "pcm")
JOBS = "/v1/audio/speech/jobs"
SENTENCES = 24
BOOK = " ".join(f"This is sentence number {n} of a book." for n in range(SENTENCES))


def config(folder: Path, upstream: str) -> tuple[Path, int]:
    (port,) = free_ports(1)
    path = folder / "config.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "listen": f"127.0.0.1:{port}",
                "upstreams": {"swapper": {"url": upstream}},
                "backends": {"voice": {"kind": "hibari"}},
                "groups": {
                    "chat": {"mode": "read", "models": ["qwen"], "upstream": "swapper"},
                    "speech": {"mode": "write", "models": ["hibari"], "backend": "voice"},
                },
                "aliases": {"tts-1": "hibari"},
                "speech": {"max_input": 100_000, "job_slice": 3},
            }
        )
    )
    return path, port


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Server]:
    async with FakeSwapper({"qwen": FakeModel()}) as swapper:
        server = Server(*config(folder, swapper.url))
        await server.start()
        try:
            yield server
        finally:
            await server.stop()


async def post(client: aiohttp.ClientSession, text: str, format: str = "pcm") -> bytes:
    body = {"model": "hibari", "input": text, "response_format": format}
    async with client.post("/v1/audio/speech", json=body) as reply:
        assert reply.status == 200
        return await reply.read()


async def test_the_openai_client_gets_six_formats_as_files_and_as_streams(tmp_path: Path) -> None:
    text = "The first sentence is here. And this is the second one, which is longer."
    async with running(tmp_path) as server, aiohttp.ClientSession(server.url) as http:
        seconds = len(await post(http, text)) / 48000
        with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            for format in FORMATS:
                ask = client.audio.speech.create
                answer = await asyncio.to_thread(ask, model="tts-1", voice="nova", input=text, response_format=format)
                for reader, (samples, rate) in all_readers(format, answer.content).items():
                    assert samples.size / rate == pytest.approx(seconds, abs=0.1), (format, reader)
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            for format in FORMATS:
                stream = client.audio.speech.with_streaming_response.create
                async with stream(model="tts-1", voice="nova", input=text, response_format=format) as reply:
                    data = b"".join([chunk async for chunk in reply.iter_bytes()])
                for reader, (samples, rate) in all_readers(format, data).items():
                    assert samples.size / rate == pytest.approx(seconds, abs=0.1), (format, reader)


async def test_four_of_eight_that_hang_up_do_not_change_the_others(tmp_path: Path) -> None:
    texts = [f"Number {n} begins here. Then number {n} goes on for a while. Number {n} ends." for n in range(8)]
    async with running(tmp_path) as server, aiohttp.ClientSession(server.url) as client:
        alone = [await post(client, text) for text in texts]

        async def speak(number: int) -> bytes:
            if number % 2 == 0:
                return await post(client, texts[number])
            body = {"model": "hibari", "input": texts[number], "response_format": "pcm"}
            async with client.post("/v1/audio/speech", json=body) as reply:
                await reply.content.readany()
                reply.close()
            return b""

        together = await asyncio.gather(*(speak(number) for number in range(8)))
        assert together[::2] == alone[::2]


async def test_a_job_survives_sigkill_and_loses_nothing_that_was_done(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        async with aiohttp.ClientSession(server.url) as client:
            whole = await post(client, BOOK)
            job = await _submit(client)
            before = await _when(client, job, lambda shown: shown["progress"]["sentences_done"] >= 3)
            assert before["status"] != "done"
        await server.stop(signal.SIGKILL)
        await server.start()
        async with aiohttp.ClientSession(server.url) as client:
            async with client.get(f"{JOBS}/{job}") as reply:
                after = await reply.json()
            assert after["progress"]["sentences_done"] >= before["progress"]["sentences_done"]
            assert (after["created_at"], after["started_at"]) == (before["created_at"], before["started_at"])
            async with client.get(f"{JOBS}/{job}/audio") as reply:
                assert await reply.read() == whole
            assert (await _when(client, job, lambda shown: shown["status"] == "done"))["error"] is None


async def test_chat_is_answered_while_a_long_job_is_spoken(tmp_path: Path) -> None:
    async with running(tmp_path) as server, aiohttp.ClientSession(server.url) as client:
        job = await _submit(client)
        await _when(client, job, lambda shown: shown["progress"]["sentences_done"] >= 2)
        done = []
        for _ in range(3):
            body = {"model": "qwen", "messages": [{"role": "user", "content": "hello"}]}
            async with client.post("/v1/chat/completions", json=body) as reply:
                assert (await reply.json())["choices"]
            async with client.get(f"{JOBS}/{job}") as reply:
                done.append((await reply.json())["progress"]["sentences_done"])
        assert done == sorted(done)
        assert done[-1] < SENTENCES
        assert (await _when(client, job, lambda shown: shown["status"] == "done"))["progress"][
            "sentences_done"
        ] == SENTENCES


async def _submit(client: aiohttp.ClientSession) -> str:
    async with client.post(JOBS, json={"model": "hibari", "input": BOOK, "response_format": "pcm"}) as reply:
        assert reply.status == 202
        id: str = (await reply.json())["id"]
        return id


async def _when(client: aiohttp.ClientSession, job: str, happened: Any) -> dict[str, Any]:
    """The job as the first event shows it of which that is true."""
    async with client.get(f"{JOBS}/{job}/events") as reply:
        async for line in reply.content:
            if line.startswith(b"data: ") and happened(shown := json.loads(line[6:])["job"]):
                found: dict[str, Any] = shown
                return found
    raise AssertionError("the events ended without it")
