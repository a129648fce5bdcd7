"""The real openai and anthropic clients, sync and async: what they read, what they retry, what they raise."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest

from tests.fakes import Exchange, FakeModel, FakeSwapper, RawClient, faults, text, vector
from tests.fakes.answers import answer
from tests.fakes.faulty import Behaviour
from tests.proxy.conftest import StartFault
from tests.proxy.served import CHAT, Fault, Served, chat, in_front_of

Serve = Callable[[Mapping[str, Any]], Awaitable[Served]]
SAY: Any = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def openai_client(proxy: Served, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="any", **options) as client:
        yield client


@asynccontextmanager
async def anthropic_client(proxy: Served, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=proxy.url, api_key="any", **options) as client:
        yield client


@asynccontextmanager
async def busy(f: Fault) -> AsyncIterator[RawClient]:
    """A client that has the lease for itself; it hangs up at the end, or before."""
    async with f.proxy.raw() as holder:
        await holder.post(CHAT, chat("t", stream=True))
        await f.upstream.until(1)
        await f.proxy.until(holding=1)
        yield holder


async def answered(proxy: Served, code: int, route: str = CHAT) -> float:
    """How many requests of a route ended with this status."""
    page = (await proxy.ask("GET", "/metrics")).body.decode()
    lines = [line for line in page.splitlines() if line.startswith("llama_lease_requests_total{")]
    return sum(float(line.split()[-1]) for line in lines if f'code="{code}"' in line and f'route="{route}"' in line)


# What they read


async def test_the_async_client_chats_streams_and_embeds(serve_proxy: Serve) -> None:
    async with FakeSwapper(["q", "e", "org/v"]) as swapper:
        proxy = await serve_proxy(in_front_of(swapper.url))
        async with openai_client(proxy) as client:
            whole = await client.chat.completions.create(model="q", messages=SAY)
            assert whole.choices[0].message.content == text("q", "hello")
            stream = await client.chat.completions.create(model="q", messages=SAY, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(pieces) == text("q", "hello")
            found = await client.embeddings.create(model="e", input=["a", "b"], encoding_format="float")
            assert [data.embedding for data in found.data] == [vector("e", "a"), vector("e", "b")]
            response = await client.responses.create(model="q", input="hello")
            assert response.output_text == text("q", "hello")
            assert [model.id async for model in client.models.list()] == ["q", "e", "org/v"]
            assert (await client.models.retrieve("org/v")).id == "org/v"
        await proxy.idle()


async def test_the_sync_client_chats_and_streams(serve_proxy: Serve) -> None:
    def talk(url: str) -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
            whole = client.chat.completions.create(model="q", messages=SAY)
            stream = client.chat.completions.create(model="q", messages=SAY, stream=True)
            return whole.choices[0].message.content, "".join(c.choices[0].delta.content or "" for c in stream)

    async with FakeSwapper(["q"]) as swapper:
        proxy = await serve_proxy(in_front_of(swapper.url))
        said = text("q", "hello")
        assert await asyncio.to_thread(talk, proxy.url) == (said, said)
        await proxy.idle()


async def test_a_transcription_is_uploaded(serve_proxy: Serve) -> None:
    async with FakeSwapper(["w"]) as swapper:
        proxy = await serve_proxy(in_front_of(swapper.url))
        async with openai_client(proxy) as client:
            got = await client.audio.transcriptions.create(model="w", file=("a.wav", b"RIFF" * 300_000))
            assert got.text
        await proxy.idle()


async def test_the_anthropic_client_talks_and_streams(serve_proxy: Serve) -> None:
    async with FakeSwapper(["q"]) as swapper:
        proxy = await serve_proxy(in_front_of(swapper.url))
        async with anthropic_client(proxy) as client:
            whole = await client.messages.create(model="q", max_tokens=9, messages=SAY)
            assert whole.content[0].to_dict()["text"] == text("q", "hello")
            async with client.messages.stream(model="q", max_tokens=9, messages=SAY) as stream:
                assert "".join([piece async for piece in stream.text_stream]) == text("q", "hello")
        await proxy.idle()


@pytest.mark.parametrize("kind", ["comment", "chunk"])
async def test_keep_alives_do_not_disturb_the_openai_client(fault: StartFault, kind: str) -> None:
    soon = {"heartbeat": 0.01, "heartbeat_interval": 0.01}
    f = await fault(faults.stalls_after(1), lease=soon, group={"heartbeat": kind})
    async with openai_client(f.proxy) as client, busy(f) as holder:
        stream = await client.chat.completions.create(model="m", messages=SAY, stream=True)
        async with f.proxy.raw() as clock:
            await clock.post(CHAT, chat(stream=True))
            await clock.read_until(b"waiting" if kind == "comment" else b"chatcmpl-waiting")
        holder.hang_up()
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text("m", "hello")


async def test_keep_alives_do_not_disturb_the_anthropic_client(serve_proxy: Serve) -> None:
    async with FakeSwapper({"q": FakeModel(), "t": FakeModel()}, matrix="q & t") as swapper:
        soon = {"heartbeat": 0.01, "heartbeat_interval": 0.01}
        proxy = await serve_proxy(in_front_of(swapper.url, lease=soon))
        gate = swapper.hold("t")
        speaking = asyncio.create_task(proxy.chat("t"))
        await gate.reached.wait()
        async with (
            proxy.raw() as clock,
            anthropic_client(proxy) as client,
            client.messages.stream(model="q", max_tokens=9, messages=SAY) as stream,
        ):
            await clock.post("/v1/messages", chat("q", stream=True))
            await clock.read_until(b"ping")
            await clock.read_until(b"ping")
            gate.open()
            assert "".join([piece async for piece in stream.text_stream]) == text("q", "hello")
        await speaking
        await proxy.idle()


# What they retry


async def test_a_full_queue_is_retried_after_what_retry_after_says(fault: StartFault) -> None:
    f = await fault(faults.stalls_after(1), lease={"max_waiting": 0})
    async with openai_client(f.proxy, max_retries=1) as client, busy(f) as holder:
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=SAY))
        while not await answered(f.proxy, 429):
            pass
        holder.hang_up()
        assert (await asking).choices[0].message.content == text("m", "hello")
    assert await answered(f.proxy, 429) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wait_that_was_too_long_is_not_retried(fault: StartFault, stream: bool) -> None:
    f = await fault(faults.stalls_after(1), lease={"max_wait": 0.05})
    async with openai_client(f.proxy, max_retries=2) as client, busy(f):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=SAY, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (503, "wait_too_long")
    assert await answered(f.proxy, 503) == 1


async def test_anthropics_client_does_not_retry_it_either(fault: StartFault) -> None:
    f = await fault(faults.stalls_after(1), lease={"max_wait": 0.05})
    async with anthropic_client(f.proxy, max_retries=2) as client, busy(f):
        with pytest.raises(anthropic.APIStatusError) as caught:
            await client.messages.create(model="m", max_tokens=9, messages=SAY)
    assert caught.value.status_code == 503
    assert await answered(f.proxy, 503, "/v1/messages") == 1


async def test_a_client_that_asks_for_less_patience_fails_fast(fault: StartFault) -> None:
    f = await fault(faults.stalls_after(1))
    async with openai_client(f.proxy, default_headers={"X-Max-Wait": "0"}) as client, busy(f):
        with pytest.raises(openai.InternalServerError, match="0 s allowed"):
            await client.chat.completions.create(model="m", messages=SAY)


# What they raise


async def test_bad_input_raises_with_its_field(fault: StartFault) -> None:
    f = await fault(faults.ok)
    async with openai_client(f.proxy) as client, anthropic_client(f.proxy) as other:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="", messages=SAY)
        assert (caught.value.param, caught.value.type) == ("model", "invalid_request_error")
        with pytest.raises(anthropic.BadRequestError, match="'model'"):
            await other.messages.create(model="", max_tokens=9, messages=SAY)


async def test_a_wrong_key_raises(serve_proxy: Serve) -> None:
    proxy = await serve_proxy(in_front_of("http://127.0.0.1:9", api_keys=["good"]))
    async with openai_client(proxy) as client, anthropic_client(proxy) as other:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        with pytest.raises(anthropic.AuthenticationError):
            await other.messages.create(model="m", max_tokens=9, messages=SAY)


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        (faults.truncated, "upstream_truncated"),
        (faults.error_appended, "upstream_truncated"),
        (faults.dies_in_mid_stream, "upstream_truncated"),
    ],
    ids=["truncated", "error appended", "died"],
)
async def test_a_stream_that_breaks_off_raises_after_what_it_brought(
    fault: StartFault, behaviour: Behaviour, code: str
) -> None:
    f = await fault(behaviour, behaviour)
    got: list[str] = []

    async def read(chunks: openai.AsyncStream[Any]) -> None:
        async for chunk in chunks:
            got.append(chunk.choices[0].delta.content)

    async with openai_client(f.proxy, max_retries=0) as client:
        with pytest.raises(openai.APIError) as caught:
            await read(await client.chat.completions.create(model="m", messages=SAY, stream=True))
    assert (len(got), caught.value.code) == (3, code)

    def read_in_a_thread() -> None:
        with openai.OpenAI(base_url=f"{f.proxy.url}/v1", api_key="any", max_retries=0) as sync:
            for _ in sync.chat.completions.create(model="m", messages=SAY, stream=True):
                pass

    with pytest.raises(openai.APIError):
        await asyncio.to_thread(read_in_a_thread)


async def test_a_load_that_fails_behind_llama_swaps_loading_text_raises(serve_proxy: Serve) -> None:
    async with FakeSwapper(["q"], loading_state=True) as swapper:
        swapper.fail_loads["q"] = 1
        proxy = await serve_proxy(in_front_of(swapper.url))
        async with openai_client(proxy) as client:
            stream = await client.chat.completions.create(model="q", messages=SAY, stream=True)
            assert (await anext(aiter(stream))).choices
            with pytest.raises(openai.APIError, match="failed to load") as caught:
                await anext(aiter(stream))
        assert caught.value.code == "upstream_truncated"
        await proxy.idle()
        assert (await proxy.chat("q", stream=True)).status == 200


async def test_a_model_that_is_stopped_in_mid_stream_raises_though_llama_swap_ends_cleanly(serve_proxy: Serve) -> None:
    async with FakeSwapper(["q"]) as swapper:
        proxy = await serve_proxy(in_front_of(swapper.url))
        gate = swapper.hold("q", after=200)
        async with openai_client(proxy) as client:
            stream = await client.chat.completions.create(model="q", messages=SAY, stream=True)
            assert (await anext(aiter(stream))).choices
            await gate.reached.wait()
            swapper.unload({"q"})
            with pytest.raises(openai.APIError) as caught:
                await anext(aiter(stream))
        assert caught.value.code == "upstream_truncated"
        await proxy.idle()


@pytest.mark.parametrize("kind", ["comment", "chunk"])
async def test_an_error_of_the_lease_behind_keep_alives_raises(fault: StartFault, kind: str) -> None:
    lease = {"heartbeat": 0.01, "heartbeat_interval": 0.01, "max_wait": 0.5}
    f = await fault(faults.stalls_after(1), lease=lease, group={"heartbeat": kind})

    async def read(client: openai.AsyncOpenAI) -> None:
        async for _ in await client.chat.completions.create(model="m", messages=SAY, stream=True):
            pass

    async with openai_client(f.proxy) as client, busy(f):
        with pytest.raises(openai.APIError) as caught:
            await read(client)
    assert caught.value.code == "wait_too_long"


async def test_an_error_of_the_lease_behind_pings_raises(fault: StartFault) -> None:
    lease = {"heartbeat": 0.01, "heartbeat_interval": 0.01, "max_wait": 0.5}
    f = await fault(faults.stalls_after(1), lease=lease)

    async def read(client: anthropic.AsyncAnthropic) -> None:
        async with client.messages.stream(model="m", max_tokens=9, messages=SAY) as stream:
            async for _ in stream:
                pass

    async with anthropic_client(f.proxy) as client, busy(f):
        with pytest.raises(anthropic.APIStatusError, match=r"waited 0\.5 s"):
            await read(client)


async def test_a_message_that_breaks_off_raises(fault: StartFault) -> None:
    async def truncated(exchange: Exchange) -> None:
        await exchange.open_stream()
        for piece in answer("/messages", "m", {"stream": True}).pieces[:4]:
            await exchange.chunk(piece)
        await exchange.end()

    f = await fault(truncated)

    async def read(client: anthropic.AsyncAnthropic) -> None:
        async with client.messages.stream(model="m", max_tokens=9, messages=SAY) as stream:
            async for _ in stream:
                pass

    async with anthropic_client(f.proxy) as client:
        with pytest.raises(anthropic.APIStatusError, match="before the answer was complete"):
            await read(client)


async def test_an_upstream_that_cannot_be_reached_raises(fault: StartFault) -> None:
    f = await fault(*[faults.dies_before_headers] * 2)
    async with openai_client(f.proxy, max_retries=0) as client, anthropic_client(f.proxy, max_retries=0) as other:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=SAY)
        assert (caught.value.status_code, caught.value.code) == (502, "upstream_reset")
        with pytest.raises(anthropic.InternalServerError):
            await other.messages.create(model="m", max_tokens=9, messages=SAY)


async def test_a_client_that_stops_reading_a_stream_frees_the_lease(fault: StartFault) -> None:
    f = await fault(faults.stalls_after(3))
    async with openai_client(f.proxy) as client:
        stream = await client.chat.completions.create(model="t", messages=SAY, stream=True)
        assert (await anext(aiter(stream))).choices
        await stream.close()
        await (await f.upstream.until(1)).gone.wait()


async def test_a_client_that_times_out_leaves_the_line(fault: StartFault) -> None:
    f = await fault(faults.stalls_after(1))
    async with openai_client(f.proxy, max_retries=0, timeout=0.1) as client, busy(f):
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="m", messages=SAY)
        await f.proxy.until(waiting=0, holding=1)
    assert len(f.upstream.exchanges) == 1
