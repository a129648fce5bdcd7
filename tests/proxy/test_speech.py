import asyncio
import base64
import json
import threading
import wave
from collections.abc import Awaitable, Callable, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientPayloadError, ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer

from backends.audio import to_pcm
from proxy.errors import HoldExpired
from proxy.speech import SpeechSettings, SpeechStream, parse
from tests.fakes import FakeSpeech, RawClient, spoken
from tests.fakes.speech import SpeechGate
from tests.proxy.speech_app import SpeechApp

Client = TestClient[web.Request, web.Application]
Start = Callable[[SpeechApp], Awaitable[Client]]


@pytest.fixture
def backend() -> FakeSpeech:
    fake = FakeSpeech()
    fake.load()
    return fake


@pytest.fixture
def start(aiohttp_server: Any, aiohttp_client: Any) -> Start:
    async def _start(speech: SpeechApp) -> Client:
        server: TestServer = await aiohttp_server(speech.application())
        client: Client = await aiohttp_client(server)
        return client

    return _start


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "input": text, "response_format": "pcm", **fields}


async def next_event(reply: ClientResponse) -> dict[str, Any]:
    lines = (await reply.content.readuntil(b"\n\n")).splitlines()
    event: dict[str, Any] = json.loads(b"".join(line.removeprefix(b"data: ") for line in lines if line[:1] == b"d"))
    return event


async def reached(gate: SpeechGate) -> None:
    assert await asyncio.to_thread(gate.reached.wait, 30)


async def test_pcm_is_what_the_backend_said(start: Start, backend: FakeSpeech) -> None:
    client = await start(SpeechApp(backend))
    reply = await client.post("/v1/audio/speech", json=ask("One. Two."))
    assert reply.status == 200
    assert reply.headers["Content-Type"] == "audio/pcm"
    assert reply.headers["X-Accel-Buffering"] == "no"
    assert reply.headers["Transfer-Encoding"] == "chunked"
    assert await reply.read() == to_pcm(spoken("One.")) + to_pcm(spoken("Two."))


class SlowReader(FakeSpeech):
    """Stands at the gate when it cuts a text of several sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = SpeechGate(1, 0)

    def split(self, text: str) -> Sequence[str]:
        if len(pieces := super().split(text)) > 1:
            self.gate.wait(threading.Event())
        return pieces


async def test_others_are_served_while_a_long_text_is_cut(start: Start) -> None:
    backend = SlowReader()
    backend.load()
    client = await start(SpeechApp(backend))
    long = asyncio.create_task(client.post("/v1/audio/speech", json=ask("One. Two.")))
    await reached(backend.gate)
    reply = await client.post("/v1/audio/speech", json=ask("Short."))
    assert await reply.read() == to_pcm(spoken("Short."))
    backend.gate.open()
    assert await (await long).read() == to_pcm(spoken("One.")) + to_pcm(spoken("Two."))


async def test_a_streamed_wav_has_one_header_of_unknown_size(start: Start, backend: FakeSpeech) -> None:
    client = await start(SpeechApp(backend))
    reply = await client.post("/v1/audio/speech", json=ask("One. Two.", response_format="wav"))
    data = await reply.read()
    assert data[4:8] == data[40:44] == b"\xff\xff\xff\xff"
    assert data.count(b"RIFF") == data.count(b"data") == 1
    with wave.open(BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24000, 1, 2)
    assert data[44:] == to_pcm(spoken("One.")) + to_pcm(spoken("Two."))


async def test_the_first_sentence_is_sent_while_the_second_is_made(start: Start, backend: FakeSpeech) -> None:
    speech = SpeechApp(backend)
    client = await start(speech)
    gate = backend.hold(piece=2)
    reply = await client.post("/v1/audio/speech", json=ask("One. Two."))
    first = to_pcm(spoken("One."))
    assert await reply.content.readexactly(len(first)) == first
    assert speech.lock.locked()
    assert speech.opened == 1
    gate.open()
    assert await reply.read() == to_pcm(spoken("Two."))
    await speech.ended.wait()
    ((name, seconds, tokens, characters),) = speech.done
    assert (name, tokens, characters) == ("fake", 8, 9)
    assert seconds == pytest.approx(8 * 0.02)


async def test_a_slow_reader_does_not_hold_the_lease(start: Start) -> None:
    backend = FakeSpeech(samples=480_000)  # 20 s, nearly 1 MB, for each letter
    backend.load()
    speech = SpeechApp(backend, SpeechSettings(spool_memory=1 << 16))
    client = await start(speech)
    reply = await client.post("/v1/audio/speech", json=ask("Abcdefghijklmnop."))
    await speech.produced.wait()
    assert not speech.lock.locked()
    assert await reply.read() == to_pcm(spoken("Abcdefghijklmnop.", samples=480_000))


async def test_a_full_spool_makes_the_thread_wait_for_the_reader(start: Start) -> None:
    backend = FakeSpeech(samples=48_000)
    backend.load()
    speech = SpeechApp(backend, SpeechSettings(spool_limit=1000))
    client = await start(speech)
    reply = await client.post("/v1/audio/speech", json=ask("Abcdefghijklmnop."))
    assert await reply.read() == to_pcm(spoken("Abcdefghijklmnop.", samples=48_000))


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
async def test_an_error_before_the_first_audio_is_an_error_object(
    start: Start, backend: FakeSpeech, stream_format: str
) -> None:
    speech = SpeechApp(backend)
    client = await start(speech)
    backend.unload()
    reply = await client.post("/v1/audio/speech", json=ask("One.", stream_format=stream_format))
    assert reply.status == 503
    error = (await reply.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "model_unavailable"
    assert speech.opened == 0


async def test_an_error_after_the_first_audio_cuts_the_connection(start: Start, backend: FakeSpeech) -> None:
    speech = SpeechApp(backend)
    client = await start(speech)
    backend.fail_at = {2}
    gate = backend.hold(piece=2)
    reply = await client.post("/v1/audio/speech", json=ask("One. Two."))
    first = to_pcm(spoken("One."))
    assert await reply.content.readexactly(len(first)) == first
    gate.open()
    with pytest.raises(ClientPayloadError):
        await reply.read()
    await speech.ended.wait()
    assert speech.streams[0].outcome == "error"
    assert speech.streams[0].error is not None
    assert not speech.lock.locked()


async def test_a_client_that_goes_stops_the_thread_before_the_lease_is_free(start: Start, backend: FakeSpeech) -> None:
    speech = SpeechApp(backend)
    client = await start(speech)
    gate = backend.hold(piece=2)
    reply = await client.post("/v1/audio/speech", json=ask("One. Two. Three."))
    await reply.content.readany()
    await reached(gate)
    reply.close()
    await speech.ended.wait()
    assert (backend.active, backend.cancelled, backend.started) == (0, 1, 2)
    assert not speech.lock.locked()
    assert (await client.post("/v1/audio/speech", json=ask("Next."))).status == 200


async def test_a_client_that_goes_before_the_first_audio_stops_the_thread(start: Start, backend: FakeSpeech) -> None:
    speech = SpeechApp(backend)
    client = await start(speech)
    gate = backend.hold()
    task = asyncio.create_task(client.post("/v1/audio/speech", json=ask("One.")))
    await reached(gate)
    task.cancel()
    await speech.ended.wait()
    assert (backend.active, backend.cancelled) == (0, 1)
    assert not speech.lock.locked()


async def test_four_of_eight_that_are_cancelled_do_not_change_the_others(start: Start, backend: FakeSpeech) -> None:
    client = await start(SpeechApp(backend))
    texts = [f"Number {n} begins. Number {n} goes on. Number {n} ends." for n in "abcdefgh"]
    alone = [await (await client.post("/v1/audio/speech", json=ask(text))).read() for text in texts]

    async def speak(number: int) -> bytes:
        reply = await client.post("/v1/audio/speech", json=ask(texts[number]))
        if number % 2:
            await reply.content.readany()
            reply.close()
            return b""
        return await reply.read()

    together = await asyncio.gather(*(speak(number) for number in range(8)))
    assert together[::2] == alone[::2]
    assert backend.most_active == 1


async def test_sse_has_two_kinds_of_events_and_the_deltas_are_one_file(start: Start, backend: FakeSpeech) -> None:
    client = await start(SpeechApp(backend))
    reply = await client.post("/v1/audio/speech", json=ask("One. Two.", stream_format="sse", response_format="wav"))
    assert reply.headers["Content-Type"] == "text/event-stream"
    events = [json.loads(line[6:]) for line in (await reply.text()).split("\n\n") if line]
    assert {event["type"] for event in events[:-1]} == {"speech.audio.delta"}
    assert all(set(event) == {"type", "audio"} for event in events[:-1])
    whole = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
    assert whole[44:] == to_pcm(spoken("One.")) + to_pcm(spoken("Two."))
    usage = {"input_tokens": 2, "output_tokens": 8, "total_tokens": 10}
    assert events[-1] == {"type": "speech.audio.done", "usage": usage}


async def test_sse_carries_comments_until_the_first_audio(start: Start, backend: FakeSpeech) -> None:
    client = await start(SpeechApp(backend, SpeechSettings(heartbeat=0.01)))
    gate = backend.hold()
    reply = await client.post("/v1/audio/speech", json=ask("One.", stream_format="sse"))
    assert await reply.content.readline() == b": speaking\n"
    assert await reply.content.readline() == b": speaking\n"
    gate.open()
    lines = (await reply.read()).splitlines()
    assert lines[-2].startswith(b'data: {"type":"speech.audio.done"')


async def test_sse_goes_on_in_a_response_that_was_prepared_while_waiting(start: Start, backend: FakeSpeech) -> None:
    client = await start(SpeechApp(backend, prepare_first=True))
    reply = await client.post("/v1/audio/speech", json=ask("One.", stream_format="sse"))
    lines = (await reply.read()).splitlines()
    assert lines[0] == b": waiting"
    assert lines[1].startswith(b'data: {"type":"speech.audio.delta"')
    assert lines[-2].startswith(b'data: {"type":"speech.audio.done"')


async def test_an_error_in_an_event_stream_is_an_event_and_a_cut(start: Start, backend: FakeSpeech) -> None:
    client = await start(SpeechApp(backend, SpeechSettings(heartbeat=0.01)))
    backend.fail_at = {1}
    gate = backend.hold()
    reply = await client.post("/v1/audio/speech", json=ask("One.", stream_format="sse"))
    assert await reply.content.readline() == b": speaking\n"
    gate.open()
    while "error" not in (event := await next_event(reply)):
        assert event["type"] == "speech.audio.delta"
    assert event["error"]["code"] == "synthesis_failed"
    with pytest.raises(ClientPayloadError):
        await reply.read()


async def test_a_block_that_fails_after_the_response_began_cuts_it(start: Start, backend: FakeSpeech) -> None:
    class Expiring(SpeechApp):
        async def speak(self, request: web.Request) -> web.StreamResponse:
            speech = parse(await request.read(), self.settings)
            async with SpeechStream(request, speech, self.backend, self.settings) as stream:
                self.streams.append(stream)
                try:
                    async with asyncio.timeout(None) as self.limit:
                        await stream.produce(self._open)
                except TimeoutError:
                    raise HoldExpired("held too long") from None
                return await stream.finish()
            return stream.response

    speech = Expiring(backend)
    client = await start(speech)
    gate = backend.hold(piece=2)
    reply = await client.post("/v1/audio/speech", json=ask("One. Two."))
    await reply.content.readany()
    await reached(gate)
    speech.limit.reschedule(asyncio.get_running_loop().time())
    with pytest.raises(ClientPayloadError):
        await reply.read()
    assert speech.streams[0].outcome == "error"
    assert backend.active == 0


async def test_http_1_0_gets_the_audio_without_chunks(start: Start, backend: FakeSpeech) -> None:
    client = await start(SpeechApp(backend))
    assert client.port is not None
    body = json.dumps(ask("One.")).encode()
    async with RawClient(f"http://127.0.0.1:{client.port}") as raw:
        await raw.send(
            b"POST /v1/audio/speech HTTP/1.0\r\nHost: a\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head, _, audio = (await raw.read_rest()).partition(b"\r\n\r\n")
    assert b" 200 " in head
    assert b"chunked" not in head.lower()
    assert audio == to_pcm(spoken("One."))


async def test_speed_beyond_the_backends_range_is_made_up_by_tempo(start: Start, backend: FakeSpeech) -> None:
    client = await start(SpeechApp(backend))
    reply = await client.post("/v1/audio/speech", json=ask("A sentence that is not short.", speed=4))
    audio = np.frombuffer(await reply.read(), "<i2")
    assert backend.said[0].speed == 2.0
    assert audio.size / 24000 == pytest.approx(29 * 0.02 / 4, abs=0.05)


async def test_a_text_with_nothing_to_say_is_refused(start: Start, backend: FakeSpeech) -> None:
    client = await start(SpeechApp(backend))
    reply = await client.post("/v1/audio/speech", json=ask("   "))
    assert reply.status == 400
    assert (await reply.json())["error"]["param"] == "input"
