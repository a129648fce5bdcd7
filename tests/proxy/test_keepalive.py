"""What a client gets to read while it waits for the lease, and what not."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from tests.fakes import Exchange, RawClient, faults
from tests.fakes.answers import JSON
from tests.fakes.faulty import Behaviour
from tests.proxy.conftest import StartFault
from tests.proxy.served import CHAT, Fault, Served, chat

Serve = Callable[[Mapping[str, Any]], Awaitable[Served]]
SOON = {"heartbeat": 0.01, "heartbeat_interval": 0.01}
COMMENT = b": waiting for the GPU\n"


async def blocked(start: StartFault, *behaviours: Behaviour, **sections: Any) -> tuple[Fault, RawClient]:
    """A proxy whose lease a writer holds until the client that comes back hangs up."""
    f = await start(faults.stalls_after(1), *behaviours, lease={**SOON, **sections.pop("lease", {})}, **sections)
    holder = await f.proxy.raw().__aenter__()
    await holder.post(CHAT, chat("t", stream=True))
    await f.upstream.until(1)
    return f, holder


async def chunks(client: RawClient, count: int) -> list[bytes]:
    """The next chunks of a chunked answer, each as it was written."""
    found = []
    for _ in range(count):
        size = int(await client.read_until(b"\r\n"), 16)
        found.append((await client.read(size + 2))[:-2])
    return found


def unwrapped(stream: bytes) -> bytes:
    """A chunked body without its chunks."""
    body = b""
    while stream:
        size, _, rest = stream.partition(b"\r\n")
        body, stream = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


async def test_a_waiting_stream_gets_its_head_and_comments_with_one_line_end(fault: StartFault) -> None:
    f, holder = await blocked(fault)
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat(stream=True), X_Request_Id="abc")
        status, headers = await client.read_head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert (headers["x-accel-buffering"], headers["cache-control"]) == ("no", "no-cache")
        assert headers["x-request-id"] == "abc"
        assert await chunks(client, 5) == [COMMENT] * 5
        holder.hang_up()
        body = await client.read_body(headers)
    assert body.lstrip(COMMENT) == faults.CHAT.body.lstrip(COMMENT)
    assert body.replace(COMMENT, b"") == faults.CHAT.body
    assert body.startswith((COMMENT, faults.CHAT.body))


async def test_nothing_but_the_answer_comes_after_its_first_byte(fault: StartFault) -> None:
    opened = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await exchange.open_stream()
        await exchange.chunk(faults.CHAT.pieces[0])
        await opened.wait()
        for piece in faults.CHAT.pieces[1:]:
            await exchange.chunk(piece)
        await exchange.end()

    f = await fault(slow, faults.never_answers, lease=SOON)
    async with f.proxy.raw() as client, f.proxy.raw() as clock:
        await client.post(CHAT, chat(stream=True))
        await client.read_head()
        await client.read_until(faults.CHAT.pieces[0])
        await clock.post(CHAT, chat(stream=True))
        await clock.read_head()
        await chunks(clock, 5)  # five intervals have gone by
        opened.set()
        between = (await client.read_until(faults.CHAT.pieces[1])).removesuffix(faults.CHAT.pieces[1])
        assert re.fullmatch(rb"\r\n[0-9a-f]+\r\n", between)  # the frame of the next chunk and nothing else


async def test_comments_go_on_from_the_head_of_the_answer_to_its_first_byte(fault: StartFault) -> None:
    opened = asyncio.Event()

    async def head_first(exchange: Exchange) -> None:
        await exchange.open_stream()
        await opened.wait()
        for piece in faults.CHAT.pieces:
            await exchange.chunk(piece)
        await exchange.end()

    f = await fault(head_first, lease={"heartbeat": 60, "heartbeat_interval": 0.01})
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat(stream=True))
        _, headers = await client.read_head()
        assert await chunks(client, 3) == [COMMENT] * 3
        opened.set()
        assert (await client.read_body(headers)).replace(COMMENT, b"") == faults.CHAT.body


async def test_within_the_grace_a_refusal_keeps_its_status(fault: StartFault) -> None:
    f, holder = await blocked(fault, lease={"heartbeat": 60, "max_waiting": 0})
    reply = await f.proxy.chat(stream=True)
    assert (reply.status, reply.error["code"]) == (429, "queue_full")
    holder.hang_up()


@pytest.mark.parametrize(
    ("path", "group", "beat"),
    [
        (CHAT, {}, COMMENT),
        ("/v/chat/completions", {}, COMMENT),
        ("/v1/completions", {"heartbeat": "chunk"}, COMMENT),
        ("/v1/responses", {}, COMMENT),
        ("/v1/messages", {}, b'event: ping\ndata: {"type": "ping"}\n\n'),
        ("/v1/messages", {"heartbeat": "chunk"}, b'event: ping\ndata: {"type": "ping"}\n\n'),
    ],
)
async def test_each_protocol_has_its_own_keep_alive(
    fault: StartFault, path: str, group: dict[str, Any], beat: bytes
) -> None:
    f, holder = await blocked(fault, group=group)
    async with f.proxy.raw() as client:
        await client.post(path, chat(stream=True))
        await client.read_head()
        assert await chunks(client, 2) == [beat] * 2
    holder.hang_up()


async def test_a_group_may_send_empty_chunks_for_clients_that_count_those(fault: StartFault) -> None:
    f, holder = await blocked(fault, group={"heartbeat": "chunk"})
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat(stream=True))
        await client.read_head()
        for beat in await chunks(client, 2):
            said = json.loads(beat.removeprefix(b"data: "))
            assert (said["object"], said["model"]) == ("chat.completion.chunk", "m")
            assert said["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}]
    holder.hang_up()


@pytest.mark.parametrize(
    ("fields", "group"), [({}, {}), ({"stream": False}, {}), ({"stream": True}, {"heartbeat": "off"})]
)
async def test_where_no_keep_alive_is_wanted_the_true_status_is_kept(
    fault: StartFault, fields: dict[str, Any], group: dict[str, Any]
) -> None:
    f, holder = await blocked(fault, faults.refuses(500), group=group)
    async with f.proxy.raw() as client, f.proxy.raw() as clock:
        await client.post(CHAT, chat(**fields))
        await f.proxy.until(waiting=1)
        await clock.post("/v1/audio/speech", {"model": "t", "input": "x", "stream": True})
        await clock.read_head()
        await chunks(clock, 5)
        clock.hang_up()
        await f.proxy.until(waiting=1)
        holder.hang_up()
        assert (await client.read_head())[0] == 500


async def test_a_json_answer_is_padded_only_where_that_is_asked_for(fault: StartFault) -> None:
    f, holder = await blocked(fault, group={"pad_json": True})
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat())
        status, headers = await client.read_head()
        assert (status, headers["content-type"]) == (200, JSON)
        assert await chunks(client, 3) == [b" "] * 3
        holder.hang_up()
        body = await client.read_body(headers)
    assert body.lstrip() == faults.TEXT.body


async def test_a_padded_answer_that_comes_to_nothing_has_the_error_and_is_cut(fault: StartFault) -> None:
    f, holder = await blocked(fault, group={"pad_json": True}, lease={"max_wait": 0.5})
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat())
        assert (await client.read_head())[0] == 200
        body = await client.read_rest()
    assert not body.endswith(b"0\r\n\r\n")
    assert json.loads(unwrapped(body))["error"]["code"] == "wait_too_long"
    holder.hang_up()


# Errors after the head


async def errors_of(client: RawClient) -> list[dict[str, Any]]:
    """The data of all events of an answer that was cut, comments left out."""
    await client.read_head()
    raw = await client.read_rest()
    assert not raw.endswith(b"0\r\n\r\n")
    return [json.loads(line[5:]) for line in unwrapped(raw).splitlines() if line.startswith(b"data:")]


async def test_an_error_of_the_lease_after_the_head_is_an_event(fault: StartFault) -> None:
    f, holder = await blocked(fault, lease={"max_wait": 0.5})
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat(stream=True))
        [said] = await errors_of(client)
    assert (said["error"]["code"], said["error"]["type"]) == ("wait_too_long", "server_error")
    assert set(said["error"]) == {"message", "type", "param", "code"}
    holder.hang_up()


async def test_on_messages_it_is_anthropics_error_event(fault: StartFault) -> None:
    f, holder = await blocked(fault, lease={"max_wait": 0.5})
    async with f.proxy.raw() as client:
        await client.post("/v1/messages", chat(stream=True))
        said = [said for said in await errors_of(client) if said["type"] != "ping"]
    assert [(s["type"], s["error"]["type"]) for s in said] == [("error", "overloaded_error")]
    holder.hang_up()


async def test_an_upstreams_refusal_after_the_head_is_an_event_with_its_words(fault: StartFault) -> None:
    f, holder = await blocked(fault, faults.refuses(500))
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat(stream=True))
        await client.read_until(COMMENT)
        holder.hang_up()
        raw = await client.read_rest()
    assert b"data: " in raw
    assert b"answered 500" in raw
    assert b"not now" in raw


async def test_an_upstream_that_dies_after_the_head_was_promised_is_an_event(fault: StartFault) -> None:
    f, holder = await blocked(fault, faults.dies_before_headers)
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat(stream=True))
        await client.read_until(COMMENT)
        holder.hang_up()
        assert b"upstream_reset" in await client.read_rest()


@pytest.mark.parametrize("kind", [JSON, "text/html"])
async def test_an_answer_that_is_no_stream_after_a_stream_was_promised_is_an_error(
    fault: StartFault, kind: str
) -> None:
    async def other(exchange: Exchange) -> None:
        await exchange.whole(200, b"{}", {"Content-Type": kind})

    f, holder = await blocked(fault, other)
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat(stream=True))
        await client.read_until(COMMENT)
        holder.hang_up()
        assert b"upstream_not_streaming" in await client.read_rest()


async def test_a_stream_that_was_promised_plain_is_asked_for_plain(fault: StartFault) -> None:
    f = await fault(faults.ok, faults.ok)
    await f.proxy.chat(stream=True, headers={"Accept-Encoding": "gzip"})
    await f.proxy.chat(headers={"Accept-Encoding": "gzip"})
    asked = [exchange.headers["accept-encoding"] for exchange in f.upstream.exchanges]
    assert asked == ["identity", "gzip"]


async def test_a_client_that_goes_while_it_gets_comments_leaves_the_line(fault: StartFault) -> None:
    f, holder = await blocked(fault)
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat(stream=True))
        await client.read_until(COMMENT)
        client.hang_up(reset=True)
        await f.proxy.until(waiting=0, holding=1)
    holder.hang_up()
    await f.proxy.idle()
    assert len(f.upstream.exchanges) == 1


async def test_no_1xx_is_ever_sent(fault: StartFault) -> None:
    f, holder = await blocked(fault, faults.early_hints)
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat())
        await f.proxy.until(waiting=1)
        holder.hang_up()
        assert (await client.read(12)) == b"HTTP/1.1 200"


async def test_keep_alives_are_counted_by_kind(fault: StartFault) -> None:
    f, holder = await blocked(fault)
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat(stream=True))
        _, headers = await client.read_head()
        await chunks(client, 3)
        holder.hang_up()
        await client.read_body(headers)
    page = (await f.proxy.ask("GET", "/metrics")).body.decode()
    [count] = [
        line.split()[-1]
        for line in page.splitlines()
        if line.startswith('llama_lease_heartbeats_total{kind="comment"}')
    ]
    assert float(count) >= 3
