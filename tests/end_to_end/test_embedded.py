"""The real openai client, curl and the demo against the real embedded default: chat, embeddings and speech."""

import asyncio
import json
import shlex
import subprocess
import sys
import wave
from io import BytesIO
from urllib.request import urlopen

import numpy as np
import openai
import pytest

from tests.embedded import ROOT, Server, until, write_config

QUESTION = [{"role": "user", "content": "Say hello."}]
SENTENCES = "The first sentence is short. The second one comes while you hear the first. The third ends it."


@pytest.fixture
def client(embedded: Server):
    with openai.OpenAI(base_url=embedded.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(embedded: Server):
    async with openai.AsyncOpenAI(base_url=embedded.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


def lease(server: Server) -> dict:
    with urlopen(server.url + "/lease") as answer:
        return json.load(answer)["leases"]["gpu0"]


def test_chat_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=12)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 12


def test_chat_streams_token_by_token_to_its_end(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=12, stream=True))
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) > 3
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_a_stream_and_a_whole_answer_with_one_seed_are_the_same_text(client: openai.OpenAI) -> None:
    wanted = {"model": "smollm2", "messages": QUESTION, "max_tokens": 16, "temperature": 0.0, "seed": 7}
    whole = client.chat.completions.create(**wanted).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**wanted, stream=True)]
    assert "".join(parts) == whole


async def test_async_chat_streams(async_client: openai.AsyncOpenAI) -> None:
    stream = await async_client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=8, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text


def test_embeddings_are_one_vector_for_each_input(client: openai.OpenAI) -> None:
    texts = ["a cat sat on the mat", "a cat lay on the mat", "shares fell in early trading"]
    data = client.embeddings.create(model="smollm2-embed", input=texts, encoding_format="float").data
    vectors = np.array([entry.embedding for entry in data])
    assert vectors.shape == (3, 576)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]


def test_speech_is_a_sound_of_some_seconds(client: openai.OpenAI) -> None:
    answer = client.audio.speech.create(model="hibari", voice="alloy", input=SENTENCES, response_format="pcm")
    samples = np.frombuffer(answer.content, "<i2").astype(np.float32) / 32768
    assert 3 < len(samples) / 24000 < 20
    assert 0.02 < np.sqrt(np.mean(samples**2)) < 0.5


def test_streamed_speech_comes_in_more_than_one_piece(client: openai.OpenAI) -> None:
    with client.audio.speech.with_streaming_response.create(
        model="hibari", voice="alloy", input=SENTENCES, response_format="wav"
    ) as answer:
        pieces = list(answer.iter_bytes())
    assert len(pieces) > 1
    audio = b"".join(pieces)
    with wave.open(BytesIO(audio[:4] + (len(audio) - 8).to_bytes(4, "little") + audio[8:])) as reader:
        assert (reader.getframerate(), reader.getnchannels(), reader.getsampwidth()) == (24000, 1, 2)


async def test_async_speech_streams(async_client: openai.AsyncOpenAI) -> None:
    async with async_client.audio.speech.with_streaming_response.create(
        model="hibari", voice="alloy", input="Hello.", response_format="pcm"
    ) as answer:
        assert len([piece async for piece in answer.iter_bytes()]) >= 1


def test_models_list_names_upstreams_and_backends(client: openai.OpenAI) -> None:
    assert {"smollm2", "smollm2-embed", "hibari"} <= {model.id for model in client.models.list()}
    assert client.models.retrieve("hibari").id == "hibari"


def test_a_model_that_does_not_exist_is_answered_by_the_default_group(client: openai.OpenAI) -> None:
    assert client.chat.completions.create(model="gpt-4o", messages=QUESTION, max_tokens=4).choices


async def test_speech_waits_for_the_running_chat_alone_and_embeddings_for_nobody(
    embedded: Server, async_client: openai.AsyncOpenAI
) -> None:
    """Chats overlap without an end in sight; the speech that comes among them is answered all the same."""
    over = asyncio.Event()

    async def chat() -> None:
        stream = await async_client.chat.completions.create(
            model="smollm2", messages=QUESTION, max_tokens=40, stream=True
        )
        async for _ in stream:
            pass

    async def chats() -> int:
        count = 0
        while not over.is_set():
            await chat()
            count += 1
        return count

    async with asyncio.TaskGroup() as group:
        endless = [group.create_task(chats()) for _ in range(3)]
        await until(lambda: lease(embedded)["waiting"])
        embedding = await async_client.embeddings.with_raw_response.create(model="smollm2-embed", input="now")
        speech = await async_client.audio.speech.create(
            model="hibari", voice="alloy", input="My turn.", response_format="pcm"
        )
        assert not any(task.done() for task in endless)
        over.set()
    assert len(speech.content) > 24000
    assert float(embedding.headers["Server-Timing"].removeprefix("lease;dur=")) < 100
    assert not lease(embedded)["holders"]
    assert not lease(embedded)["waiting"]


def test_the_curl_lines_of_the_welcome_work(embedded: Server, tmp_path) -> None:
    lines = [line for line in embedded.welcome.splitlines() if line.startswith("curl ")]
    assert len(lines) == 3
    for line in lines:
        done = subprocess.run([*shlex.split(line), "-sS", "--fail"], capture_output=True, cwd=tmp_path, check=True)
        if "-o" not in shlex.split(line):
            assert json.loads(done.stdout)["object"] in ("chat.completion", "list")
    assert (tmp_path / "hello.mp3").stat().st_size > 5000


def test_the_demo_prints_who_waited_for_whom(embedded: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "proxy", "demo", "--url", embedded.url, "--streams", "3"],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[0].split()[:3] == ["request", "sent", "waited"]
    assert "'hibari' came at" in done.stdout
    assert "Embeddings take no turn" in done.stdout


async def test_sigterm_lets_a_running_stream_finish_and_refuses_who_waits(tmp_path) -> None:
    server = Server(*write_config(tmp_path))
    await server.start()
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        running = await client.chat.completions.create(
            model="smollm2", messages=QUESTION, max_tokens=60, temperature=0.0, stream=True
        )
        chunks = [await anext(running)]
        waiting = asyncio.create_task(
            client.audio.speech.create(model="hibari", voice="alloy", input="I wait.", response_format="pcm")
        )
        await until(lambda: lease(server)["waiting"])
        stopping = asyncio.create_task(server.stop())
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            await waiting
        chunks += [chunk async for chunk in running]
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert await stopping == 0
