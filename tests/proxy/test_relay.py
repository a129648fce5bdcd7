"""Our side of one answer, on a real connection but without an upstream or a lease."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from multidict import CIMultiDict

from proxy.app import server_options
from proxy.errors import UpstreamTruncated
from proxy.relay import ClientGone, ClientStream, KeepAlive
from proxy.sse import EventScanner
from tests.fakes import RawClient

SSE = {"Content-Type": "text/event-stream"}
ERROR = UpstreamTruncated("broke off")
Story = Callable[[ClientStream], Awaitable[None]]


@asynccontextmanager
async def telling(story: Story) -> AsyncIterator[tuple[RawClient, "asyncio.Future[None]"]]:
    """A client that has asked for an answer which `story` gives, and how the story ended."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def handle(request: web.Request) -> web.StreamResponse:
        client = ClientStream(request)
        try:
            await story(client)
            ended.set_result(None)
        except BaseException as error:
            ended.set_exception(error)
            raise
        finally:
            client.close()
        return client.response

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, **server_options())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        async with RawClient(url, small_buffers=True) as client:
            await client.head("GET", "/")
            yield client, ended
    finally:
        await runner.cleanup()


async def test_writing_never_waits_for_the_client_and_finishing_does() -> None:
    written, finished = asyncio.Event(), asyncio.Event()
    size = 20 << 20

    async def story(client: ClientStream) -> None:
        await client.start(200, None, {"Content-Length": str(size)})
        for _ in range(size >> 16):
            await client.write(bytes(1 << 16))
        written.set()
        await client.finish()
        finished.set()

    async with telling(story) as (client, ended):
        await written.wait()
        assert not finished.is_set()
        await client.read_head()
        assert await client.read(size) == bytes(size)
        await ended


@pytest.mark.parametrize("seed", range(3))
async def test_the_bytes_keep_their_order_whatever_was_spooled(seed: int) -> None:
    chance = random.Random(seed)
    pieces = [chance.randbytes(chance.choice([1, 100, 10_000, 400_000, 1_500_000])) for _ in range(25)]

    async def story(client: ClientStream) -> None:
        await client.start(200, None, {})
        for piece in pieces:
            await client.write(piece)
            await asyncio.sleep(0)
        await client.finish()
        assert client.sent == sum(map(len, pieces))

    async with telling(story) as (client, ended):
        _, headers = await client.read_head()
        assert await client.read_body(headers) == b"".join(pieces)
        await ended


async def test_a_client_that_is_too_far_behind_is_cut_off() -> None:
    async def story(client: ClientStream) -> None:
        await client.start(200, None, {})
        for _ in range(40):
            await client.write(bytes(8 << 20))

    async with telling(story) as (client, ended):
        with pytest.raises(ClientGone):
            await ended
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await client.read(320 << 20)


async def test_a_client_that_goes_while_bytes_wait_for_it_ends_the_answer() -> None:
    written = asyncio.Event()

    async def story(client: ClientStream) -> None:
        await client.start(200, None, {})
        await client.write(bytes(20 << 20))
        written.set()
        await client.finish()

    async with telling(story) as (client, ended):
        await written.wait()
        client.hang_up(reset=True)
        with pytest.raises((ClientGone, asyncio.CancelledError)):
            await ended


async def test_writing_to_a_client_that_has_gone_says_so() -> None:
    async def story(client: ClientStream) -> None:
        await client.start(200, None, {})
        client.abort()
        await client.write(b"x")

    async with telling(story) as (_, ended):
        with pytest.raises((ClientGone, asyncio.CancelledError)):
            await ended


async def test_an_answer_given_as_a_whole_starts_when_it_is_finished() -> None:
    async def story(client: ClientStream) -> None:
        client.give(201, "Made", CIMultiDict({"Content-Type": "application/json"}), b"[1, 2]")
        assert not client.started  # an error could still take its place
        await client.finish()
        assert (client.started, client.sent) == (True, 6)

    async with telling(story) as (client, ended):
        status, headers = await client.read_head()
        assert (status, headers["content-type"], headers["content-length"]) == (201, "application/json", "6")
        assert await client.read(6) == b"[1, 2]"
        await ended


async def test_nobody_to_give_a_whole_answer_to_is_a_client_that_has_gone() -> None:
    async def story(client: ClientStream) -> None:
        client.give(200, None, CIMultiDict(), b"x")
        client.abort()
        await client.finish()

    async with telling(story) as (_, ended):
        with pytest.raises((ClientGone, asyncio.CancelledError)):
            await ended


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("text/event-stream", b"", b"data: " + json.dumps(ERROR.body()).encode() + b"\n\n"),
        ("text/event-stream", b"data: 1\n\n", b"data: " + json.dumps(ERROR.body()).encode() + b"\n\n"),
        ("text/event-stream", b"data: 1\n", b"\ndata: " + json.dumps(ERROR.body()).encode() + b"\n\n"),
        ("application/json", b"", json.dumps(ERROR.body()).encode()),
        ("application/json", b'{"a"', b""),
        ("audio/wav", b"RIFF", b""),
    ],
)
async def test_a_failed_answer_has_its_error_where_there_is_a_place_for_one_and_no_end(
    kind: str, before: bytes, after: bytes
) -> None:
    async def story(client: ClientStream) -> None:
        await client.start(200, None, {"Content-Type": kind})
        if kind == "text/event-stream":
            client.events = EventScanner("/v1/chat/completions")
            client.events.feed(before)
        await client.write(before)
        await client.fail(ERROR, "openai")

    async with telling(story) as (client, ended):
        await ended
        await client.read_head()
        raw = await client.read_rest()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(data), data) for data in (before, after) if data)
    assert raw == chunks


# Keep-alives


async def beaten(alive: KeepAlive, times: int) -> None:
    while True:
        if alive.beats >= times:
            return
        await asyncio.sleep(0)


async def test_who_answers_within_the_grace_has_the_status_to_himself() -> None:
    async def story(client: ClientStream) -> None:
        async with KeepAlive(client, "comment", grace=60, interval=60) as alive:
            await alive.stop()
            await alive.stop()
            assert not client.started
            await client.start(418, None, {})
        await client.finish()

    async with telling(story) as (client, ended):
        assert (await client.read_head())[0] == 418
        await ended


async def test_off_sends_nothing_however_long_it_takes() -> None:
    async def story(client: ClientStream) -> None:
        async with KeepAlive(client, "off", grace=0, interval=0) as alive:
            for _ in range(50):
                await asyncio.sleep(0)
            alive.resume()
            assert (client.started, alive.beats) == (False, 0)
        await client.start(204, None, {})
        await client.finish()

    async with telling(story) as (client, ended):
        assert (await client.read_head())[0] == 204
        await ended


async def test_nothing_is_written_once_stop_has_returned() -> None:
    async def story(client: ClientStream) -> None:
        async with KeepAlive(client, "comment", grace=0, interval=0) as alive:
            await beaten(alive, 3)
            await alive.stop()
            beats = alive.beats
            for _ in range(50):
                await asyncio.sleep(0)
            assert alive.beats == beats
            await client.write(b"data: x\n\n")
        await client.finish()

    async with telling(story) as (client, ended):
        _, headers = await client.read_head()
        body = await client.read_body(headers)
        await ended
    assert body.endswith(b"GPU\ndata: x\n\n")


async def test_keep_alives_do_not_count_as_bytes_of_the_answer() -> None:
    async def story(client: ClientStream) -> None:
        async with KeepAlive(client, "space", grace=0, interval=0) as alive:
            await beaten(alive, 3)
        await client.write(b"{}")
        assert client.sent == 2
        await client.finish()

    async with telling(story) as (client, ended):
        _, headers = await client.read_head()
        assert headers["content-type"] == "application/json"
        assert (await client.read_body(headers)).strip() == b"{}"
        await ended


async def test_keep_alives_end_with_their_client() -> None:
    async def story(client: ClientStream) -> None:
        async with KeepAlive(client, "comment", grace=0, interval=0):
            await asyncio.Event().wait()

    async with telling(story) as (client, ended):
        await client.read_until(b"GPU\n")
        client.hang_up(reset=True)
        with pytest.raises(asyncio.CancelledError):
            await ended
