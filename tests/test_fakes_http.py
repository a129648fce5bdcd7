"""The fakes over HTTP: the swapper's routes, gates and clock, upstreams with faults, and bare clients."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.fakes import FakeModel, FakeSwapper, FaultyUpstream, RawClient, faults, refusing_url, text
from tests.fakes.faulty import Behaviour


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def chat(model: str, content: str = "hi", **fields: object) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": content}], **fields}


async def ask(http: aiohttp.ClientSession, fake: FakeSwapper, model: str, work: float = 0.0) -> str:
    headers = {"X-Fake-Work": str(work)}
    async with http.post(f"{fake.url}/v1/chat/completions", json=chat(model), headers=headers) as reply:
        return (await reply.read()).decode()


# FakeSwapper over HTTP


async def test_overlapping_streams_starve_a_speech_request_until_they_stop(http: aiohttp.ClientSession) -> None:
    models = {"q": FakeModel(), "t": FakeModel(), "e": FakeModel()}
    async with FakeSwapper(models, matrix="(q | t) & e") as fake:
        gates = [fake.hold("q") for _ in range(12)]
        streams = [asyncio.create_task(ask(http, fake, "q"))]
        await gates[0].reached.wait()
        speech = asyncio.create_task(ask(http, fake, "t"))
        await fake.until("arrived", model="t")
        for before, after in itertools.pairwise(gates):  # each starts before the last one ends
            streams.append(asyncio.create_task(ask(http, fake, "q")))
            await after.reached.wait()
            before.open()
        assert fake.resident == {"q"}
        assert fake.in_flight["q"] >= 1
        assert not speech.done()
        gates[-1].open()
        await speech
        await asyncio.gather(*streams)
        assert fake.loads == ["q", "t"]
        served = [event.model for event in fake.events_of("served")]
        assert served == ["q"] * 12 + ["t"]


async def test_a_gate_holds_before_the_headers_and_after_exactly_n_bytes(http: aiohttp.ClientSession) -> None:
    async with FakeSwapper(["q"]) as fake:
        gate = fake.hold("q")
        later = gate.then(after=5)
        sending = asyncio.create_task(http.post(f"{fake.url}/v1/chat/completions", json=chat("q", stream=True)))
        await gate.reached.wait()
        assert not sending.done()
        gate.open()
        reply = await sending
        assert await reply.content.readexactly(5) == b"data:"
        await later.reached.wait()
        assert fake.in_flight == {"q": 1}
        later.open()
        assert (await reply.content.read()).endswith(b"data: [DONE]\n\n")
        assert [event.kind for event in fake.events_of("arrived", "served", "first_byte", "done")] == [
            "arrived", "served", "first_byte", "done",
        ]  # fmt: skip


async def test_the_same_request_has_the_same_answer_streamed_or_not(http: aiohttp.ClientSession) -> None:
    async with FakeSwapper(["q"]) as fake:
        whole = json.loads(await ask(http, fake, "q"))["choices"][0]["message"]["content"]
        async with http.post(f"{fake.url}/v1/chat/completions", json=chat("q", stream=True)) as reply:
            lines = (await reply.text()).splitlines()
        datas = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert whole == text("q", "hi")
        assert "".join(data["choices"][0]["delta"].get("content", "") for data in datas) == whole


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v/chat/completions", {"model": "a/b"}),
        ("POST", "/v1/completions", {"model": "a/b", "prompt": "x"}),
        ("POST", "/v1/responses", {"model": "a/b", "input": "x", "stream": True}),
        ("POST", "/v1/messages", {"model": "a/b", "messages": [{"content": "x"}], "stream": True}),
        ("POST", "/v1/embeddings", {"model": "a/b", "input": ["x", "y"]}),
        ("POST", "/v1/audio/speech", {"model": "a/b", "input": "x"}),
        ("POST", "/v1/audio/voices", {"model": "a/b"}),
        ("POST", "/rerank", {"model": "a/b", "documents": ["x"]}),
        ("GET", "/v1/audio/voices?model=a/b", None),
        ("GET", "/props?model=a/b", None),
        ("POST", "/upstream/a/b/v1/chat/completions", {}),
        ("GET", "/upstream/a/b/health", None),
    ],
)
async def test_every_model_route_finds_its_model(
    http: aiohttp.ClientSession, method: str, path: str, body: object
) -> None:
    async with FakeSwapper(["a", "a/b"]) as fake:
        async with http.request(method, fake.url + path, json=body) as reply:
            assert reply.status == 200
            assert await reply.read()
        assert [(r.model, r.path) for r in fake.requests] == [("a/b", path)]
        assert fake.loads == ["a/b"]


async def test_a_form_may_name_its_model_after_the_file(http: aiohttp.ClientSession) -> None:
    async with FakeSwapper({"w": FakeModel(aliases=("whisper",))}) as fake:
        form = aiohttp.FormData()
        form.add_field("file", b"\r\n--x\r\n" * 1000, filename="a.wav")
        form.add_field("model", "whisper")
        async with http.post(f"{fake.url}/v1/audio/transcriptions", data=form) as reply:
            assert reply.status == 200
        assert fake.requests[0].model == "w"


async def test_paths_without_a_model_load_none(http: aiohttp.ClientSession) -> None:
    async with FakeSwapper({"q": FakeModel(aliases=("gpt",))}) as fake:
        for path in ("/", "/health", "/logs", "/metrics", "/running", "/v1/models", "/models", "/ui/x"):
            async with http.get(fake.url + path) as reply:
                assert reply.status == 200
        async with http.get(f"{fake.url}/v1/models") as reply:
            assert [model["id"] for model in (await reply.json())["data"]] == ["q", "gpt"]
        async with http.get(f"{fake.url}/api/events") as reply:
            await ask(http, fake, "q")
            assert b"arrived" in await reply.content.readuntil(b"\n\n")
        assert fake.loads == ["q"]


async def test_unload_stops_and_running_tells(http: aiohttp.ClientSession) -> None:
    async with FakeSwapper(["q", "v"]) as fake:
        await ask(http, fake, "q")
        async with http.get(f"{fake.url}/running") as reply:
            assert (await reply.json())["running"] == [{"model": "q", "state": "ready", "ttl": 0}]
        async with http.post(f"{fake.url}/api/models/unload/q") as reply:
            assert reply.status == 200
        assert fake.resident == set()
        async with http.post(f"{fake.url}/api/models/unload/none") as reply:
            assert reply.status == 404


@pytest.mark.parametrize("cuts", [False, True])
async def test_a_stream_that_is_unloaded_ends_cleanly_or_is_cut(http: aiohttp.ClientSession, cuts: bool) -> None:
    async with FakeSwapper(["q"], cuts=cuts) as fake:
        gate = fake.hold("q", after=5)
        async with http.post(f"{fake.url}/v1/chat/completions", json=chat("q", stream=True)) as reply:
            await gate.reached.wait()
            async with http.get(f"{fake.url}/unload") as answer:
                assert answer.status == 200
            if cuts:
                with pytest.raises(aiohttp.ClientError):
                    await reply.read()
            else:
                assert b"[DONE]" not in await reply.read()
        assert [event.kind for event in fake.events_of("killed", "done")] == ["killed"]


async def test_a_router_aborts_the_running_request(http: aiohttp.ClientSession) -> None:
    async with FakeSwapper(["q", "v"], kills=True) as fake:
        gate = fake.hold("q")
        running = asyncio.create_task(ask(http, fake, "q"))
        await gate.reached.wait()
        await ask(http, fake, "v")
        assert "stopped" in await running
        assert [event.model for event in fake.events_of("killed")] == ["q"]


async def test_a_client_that_goes_leaves_the_queue(http: aiohttp.ClientSession) -> None:
    async with FakeSwapper(["q", "v"]) as fake:
        gate = fake.hold("q")
        running = asyncio.create_task(ask(http, fake, "q"))
        await gate.reached.wait()
        async with RawClient(fake.url) as client:
            await client.post("/v1/chat/completions", chat("v"))
            await fake.until("arrived", model="v")
        await fake.until("gone", model="v")
        gate.open()
        await running
        assert fake.loads == ["q"]


async def test_a_load_that_fails_is_an_error_and_with_loading_text_json_at_the_end(
    http: aiohttp.ClientSession,
) -> None:
    async with FakeSwapper(["q"], loading_state=True) as fake:
        fake.fail_loads["q"] = 2
        async with http.post(f"{fake.url}/v1/chat/completions", json=chat("q")) as reply:
            assert reply.status == 502
        async with http.post(f"{fake.url}/v1/chat/completions", json=chat("q", stream=True)) as reply:
            assert reply.status == 200
            body = await reply.read()
        assert body.startswith(b"data: {")
        assert json.loads(body.split(b"\n\n")[-1])["error"]["message"]


async def test_a_websocket_uses_its_model_until_it_closes(http: aiohttp.ClientSession) -> None:
    async with FakeSwapper(["q"]) as fake:
        async with http.ws_connect(f"{fake.url}/upstream/q/ws") as socket:
            await socket.send_str("hi")
            assert (await socket.receive()).data == "q: hi"
            assert fake.in_flight == {"q": 1}
        await fake.until("done")
        assert fake.in_flight == {}


async def test_the_fake_clock_runs_as_fast_as_told(http: aiohttp.ClientSession) -> None:
    async with FakeSwapper({"q": FakeModel(load=100)}, speed=10_000) as fake:
        await ask(http, fake, "q", work=200)
        load, done = fake.events_of("load")[0].at, fake.events_of("done")[0].at
        assert done - load >= 300


# Upstreams with faults


async def test_requests_take_the_faults_in_turn_and_the_last_for_ever(http: aiohttp.ClientSession) -> None:
    async with FaultyUpstream(faults.busy(3), faults.loading(), faults.ok) as upstream:
        seen = []
        for _ in range(4):
            async with http.post(upstream.url, json={}) as reply:
                seen.append((reply.status, reply.headers.get("Retry-After")))
        assert seen == [(429, "3"), (503, None), (200, None), (200, None)]


@pytest.mark.parametrize(
    "fault", [faults.dies_before_headers, faults.dies_in_mid_stream, faults.dies_in_mid_body], ids=lambda f: f.__name__
)
async def test_an_upstream_that_dies_is_noticed(http: aiohttp.ClientSession, fault: Behaviour) -> None:
    async with FaultyUpstream(fault) as upstream:
        with pytest.raises(aiohttp.ClientError):
            async with http.post(upstream.url, json={}) as reply:
                await reply.read()


@pytest.mark.parametrize(
    ("fault", "ending"),
    [
        (faults.truncated, faults.CHAT.pieces[2]),
        (faults.error_appended, b'"type": "server_error"}}'),
        (faults.one_byte_chunks, b"data: [DONE]\n\n"),
        (faults.early_hints, b"data: [DONE]\n\n"),
        (faults.slow(0.001), b"data: [DONE]\n\n"),
        (faults.gzipped, faults.TEXT.body),
        (faults.huge(200_000), (bytes(range(256)) * 256)[3300:3392]),
    ],
)
async def test_a_strange_answer_arrives_whole(http: aiohttp.ClientSession, fault: Behaviour, ending: bytes) -> None:
    async with FaultyUpstream(fault) as upstream, http.post(upstream.url, json={"stream": True}) as reply:
        assert reply.status == 200
        assert (await reply.read()).endswith(ending)


@pytest.mark.parametrize("fault", [faults.never_answers, faults.stalls_after(2), faults.endless])
async def test_an_upstream_knows_when_its_client_has_gone(fault: Behaviour) -> None:
    async with FaultyUpstream(fault) as upstream:
        async with RawClient(upstream.url) as client:
            await client.post("/", {"stream": True})
            exchange = await upstream.until(1)
        await exchange.gone.wait()


async def test_an_address_that_refuses(http: aiohttp.ClientSession) -> None:
    with refusing_url() as url, pytest.raises(aiohttp.ClientConnectorError):
        await http.get(url)


async def test_a_slow_uploader_is_read_to_its_end() -> None:
    async with FakeSwapper(["q"]) as fake, RawClient(fake.url) as client:
        await client.upload("/v1/chat/completions", json.dumps(chat("q")).encode(), 7, 0.0)
        status, headers = await client.read_head()
        assert status == 200
        assert json.loads(await client.read_body(headers))["model"] == "q"


async def test_a_reader_that_does_not_read_stops_an_endless_stream() -> None:
    async with (
        FaultyUpstream(faults.endless) as upstream,
        RawClient(upstream.url, small_buffers=True) as client,
    ):
        await client.post("/", {"stream": True})
        await client.read_head()
        assert len(await client.read(100)) == 100
