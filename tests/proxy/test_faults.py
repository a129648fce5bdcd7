"""Upstreams that misbehave. After each test the lease is empty and the next request is served (`fault`)."""

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from typing import Any

import aiohttp
import pytest

from tests.fakes import Exchange, FaultyUpstream, faults, refusing_url
from tests.fakes.answers import JSON, SSE, answer
from tests.fakes.faulty import Behaviour
from tests.proxy.conftest import StartFault
from tests.proxy.served import CHAT, Fault, Served, chat, in_front_of

Serve = Callable[[dict[str, Any]], Any]


async def cut_stream(proxy: Served, **fields: Any) -> bytes:
    """What a chat stream brought until its connection was cut."""
    async with proxy.http.post(CHAT, json=chat(stream=True, **fields)) as reply:
        assert reply.status == 200
        got: list[bytes] = []
        with pytest.raises(aiohttp.ClientPayloadError):
            await read_to(reply, got)
        return b"".join(got)


async def read_to(reply: aiohttp.ClientResponse, pieces: list[bytes]) -> None:
    while piece := await reply.content.readany():
        pieces.append(piece)


def last_error(stream: bytes) -> dict[str, Any]:
    """The error object that ends an OpenAI stream."""
    said: dict[str, Any] = json.loads(stream.rstrip().rsplit(b"\n", 1)[-1].removeprefix(b"data: "))["error"]
    assert set(said) == {"message", "type", "param", "code"}
    return said


# The upstream dies


async def test_an_upstream_that_dies_before_its_answer_is_502(fault: StartFault) -> None:
    f = await fault(faults.dies_before_headers)
    reply = await f.proxy.chat()
    assert (reply.status, reply.error["code"], reply.error["type"]) == (502, "upstream_reset", "upstream_error")


async def test_a_kept_connection_that_died_meanwhile_is_not_the_requests_fault(fault: StartFault) -> None:
    f = await fault(faults.ok, faults.dies_before_headers)
    assert (await f.proxy.chat()).status == 200
    assert (await f.proxy.chat()).status == 200
    assert len(f.upstream.exchanges) == 3


async def test_an_upstream_that_dies_in_mid_stream_gives_an_error_event_and_a_cut(fault: StartFault) -> None:
    f = await fault(faults.dies_in_mid_stream)
    got = await cut_stream(f.proxy)
    assert got.startswith(b"".join(faults.CHAT.pieces[:3]))
    assert last_error(got)["code"] == "upstream_truncated"


async def test_an_upstream_that_dies_in_mid_body_cuts_the_connection(fault: StartFault) -> None:
    f = await fault(faults.dies_in_mid_body)
    async with f.proxy.http.post(CHAT, json=chat()) as reply:
        assert (reply.status, reply.headers["Content-Length"]) == (200, str(len(faults.TEXT.body)))
        with pytest.raises(aiohttp.ClientPayloadError):
            await reply.read()


async def test_audio_that_breaks_off_cuts_the_connection_without_a_last_chunk(fault: StartFault) -> None:
    async def breaks_off(exchange: Exchange) -> None:
        await exchange.head(200, {"Content-Type": "audio/wav", "Transfer-Encoding": "chunked"})
        await exchange.chunk(b"RIFF")
        exchange.writer.close()

    f = await fault(breaks_off)
    async with f.proxy.raw() as client:
        await client.post("/v1/audio/speech", {"model": "t", "input": "x"})
        status, headers = await client.read_head()
        assert (status, headers["x-accel-buffering"], headers["cache-control"]) == (200, "no", "no-cache")
        assert await client.read_rest() == b"4\r\nRIFF\r\n"


async def test_a_stream_that_ends_cleanly_before_its_end_is_truncated(fault: StartFault) -> None:
    f = await fault(faults.truncated)
    got = await cut_stream(f.proxy)
    assert got.startswith(b"".join(faults.CHAT.pieces[:3]))
    assert last_error(got)["code"] == "upstream_truncated"


async def test_an_error_appended_as_bare_json_becomes_an_error_event(fault: StartFault) -> None:
    f = await fault(faults.error_appended)
    got = await cut_stream(f.proxy)
    assert got.startswith(b"".join(faults.CHAT.pieces[:3]) + b'data: {"error"')
    assert last_error(got)["code"] == "upstream_truncated"
    assert "load failed" in last_error(got)["message"]


async def test_half_an_event_is_not_passed_on(fault: StartFault) -> None:
    async def half(exchange: Exchange) -> None:
        await exchange.open_stream()
        await exchange.chunk(faults.CHAT.pieces[0] + b'data: {"choices": [')
        await exchange.end()

    f = await fault(half)
    got = await cut_stream(f.proxy)
    assert got.startswith(faults.CHAT.pieces[0] + b'data: {"error"')


async def test_a_truncated_stream_of_announced_length_is_cut_too(fault: StartFault) -> None:
    async def announced(exchange: Exchange) -> None:
        await exchange.whole(200, faults.CHAT.pieces[0], {"Content-Type": SSE})

    f = await fault(announced)
    assert last_error(await cut_stream(f.proxy))["code"] == "upstream_truncated"


async def test_a_truncated_message_ends_with_anthropics_error(fault: StartFault) -> None:
    pieces = answer("/messages", "m", {"stream": True}).pieces

    async def truncated(exchange: Exchange) -> None:
        await exchange.open_stream()
        await exchange.chunk(pieces[0])
        await exchange.end()

    f = await fault(truncated)
    async with f.proxy.raw() as client:
        await client.post("/v1/messages", chat(stream=True))
        await client.read_head()
        got = await client.read_rest()
    assert b'event: error\ndata: {"type": "error", "error": {"type": "api_error"' in got
    assert not got.endswith(b"0\r\n\r\n")


async def test_an_upstream_that_does_not_speak_http_is_502(fault: StartFault) -> None:
    async def garbage(exchange: Exchange) -> None:
        await exchange.raw(b"SSH-2.0-OpenSSH\r\n\r\n")
        exchange.writer.close()

    f = await fault(garbage)
    reply = await f.proxy.chat()
    assert (reply.status, reply.error["type"]) == (502, "upstream_error")


# The upstream is busy or not there yet


async def test_429_with_retry_after_is_waited_out(fault: StartFault) -> None:
    f = await fault(faults.busy(0), faults.busy(0))
    reply = await f.proxy.chat()
    assert (reply.status, len(f.upstream.exchanges)) == (200, 3)


async def test_while_429_is_waited_out_the_lease_is_held(fault: StartFault) -> None:
    f = await fault(faults.busy(1))
    asking = asyncio.create_task(f.proxy.chat("t"))
    await f.upstream.until(1)
    [holder] = (await f.proxy.until(holding=1))["holders"]
    assert holder["model"] == "t"
    assert (await asking).status == 200


async def test_429_that_would_outlast_load_timeout_is_passed_on_with_its_retry_after(fault: StartFault) -> None:
    f = await fault(faults.busy(30), upstream={"load_timeout": 5})
    reply = await f.proxy.chat()
    assert (reply.status, reply.headers["Retry-After"]) == (429, "30")


async def test_429_without_retry_after_is_passed_on(fault: StartFault) -> None:
    f = await fault(faults.refuses(429))
    assert (await f.proxy.chat()).status == 429


async def test_503_is_waited_out_while_the_model_loads(fault: StartFault) -> None:
    f = await fault(faults.loading(), faults.loading(), faults.loading())
    reply = await f.proxy.chat(stream=True)
    assert (reply.status, reply.body) == (200, faults.CHAT.body)
    assert [exchange.body for exchange in f.upstream.exchanges] == [f.upstream.exchanges[0].body] * 4


async def test_a_big_body_is_sent_again_whole(fault: StartFault) -> None:
    f = await fault(faults.loading(), faults.busy(0))
    body = json.dumps(chat(filler="x" * (3 << 20))).encode()
    reply = await f.proxy.ask("POST", CHAT, data=BytesIO(body), headers={"Content-Type": JSON})
    assert reply.status == 200
    assert [exchange.body == body for exchange in f.upstream.exchanges] == [True] * 3


async def test_503_for_all_of_load_timeout_is_passed_on_and_the_model_left_alone(fault: StartFault) -> None:
    f = await fault(faults.loading(), upstream={"load_timeout": 0, "failed_load_backoff": 60})
    first = await f.proxy.chat("big")
    assert (first.status, first.error["message"]) == (503, "not now")
    second = await f.proxy.chat("big")
    assert (second.status, second.error["code"], second.error["param"]) == (503, "model_failed", "model")
    assert 1 <= int(second.headers["Retry-After"]) <= 60
    assert len(f.upstream.exchanges) == 1


async def test_a_model_that_failed_to_load_is_refused_without_the_lease(fault: StartFault) -> None:
    f = await fault(faults.loading(), faults.never_answers, upstream={"load_timeout": 0, "failed_load_backoff": 60})
    await f.proxy.chat("t")
    async with f.proxy.raw() as speech:
        await speech.post("/v1/audio/speech", {"model": "t2", "input": "x"})
        await f.upstream.until(2)
        assert (await f.proxy.chat("t")).error["code"] == "model_failed"
        assert len((await f.proxy.lease())["holders"]) == 1


async def test_without_a_back_off_a_failed_model_is_tried_again_at_once(fault: StartFault) -> None:
    f = await fault(faults.loading(), upstream={"load_timeout": 0, "failed_load_backoff": 0})
    assert (await f.proxy.chat("big")).status == 503
    assert (await f.proxy.chat("big")).status == 200


async def test_a_refused_connection_is_tried_until_somebody_listens(serve_proxy: Serve) -> None:
    upstream = FaultyUpstream(faults.ok)
    with refusing_url() as url:
        proxy: Served = await serve_proxy(in_front_of(url))
        asking = asyncio.create_task(proxy.chat())
        await proxy.until(holding=1)
    await upstream.start(port=int(url.rpartition(":")[2]))
    try:
        assert (await asking).status == 200
    finally:
        await upstream.close()
    await proxy.idle()


async def test_where_nobody_listens_it_is_502_after_load_timeout(serve_proxy: Serve) -> None:
    with refusing_url() as url:
        proxy: Served = await serve_proxy(in_front_of(url, upstream={"load_timeout": 0}))
        reply = await proxy.chat()
        assert (reply.status, reply.error["code"]) == (502, "upstream_unreachable")
        await proxy.idle()
        assert (await proxy.chat()).error["code"] == "model_failed"


@pytest.mark.parametrize("path", ["/running", "/logs", "/health/of/it"])
async def test_a_path_without_a_model_is_answered_at_once_whatever_the_upstream_says(
    fault: StartFault, path: str
) -> None:
    f = await fault(faults.loading(), faults.busy(1))
    assert (await f.proxy.ask("GET", path)).status == 503
    assert (await f.proxy.ask("GET", path)).status == 429
    assert len(f.upstream.exchanges) == 2


async def test_a_path_without_a_model_is_502_at_once_where_nobody_listens(serve_proxy: Serve) -> None:
    with refusing_url() as url:
        proxy: Served = await serve_proxy(in_front_of(url))
        assert (await proxy.ask("GET", "/running")).status == 502


@pytest.mark.parametrize("status", [400, 404, 500, 502])
async def test_an_upstreams_own_error_is_passed_on_unchanged(fault: StartFault, status: int) -> None:
    f = await fault(faults.refuses(status))
    reply = await f.proxy.chat(stream=True)
    assert (reply.status, reply.error["message"]) == (status, "not now")


# The upstream is slow


async def test_an_upstream_that_does_not_answer_in_time_is_504(fault: StartFault) -> None:
    f = await fault(faults.never_answers, upstream={"timeouts": {"first_byte": 0.05}})
    reply = await f.proxy.chat()
    assert (reply.status, reply.error["code"]) == (504, "upstream_timeout")
    await f.upstream.exchanges[0].gone.wait()


async def test_an_upstream_that_does_not_take_the_body_in_time_is_504(serve_proxy: Serve) -> None:
    connections: list[asyncio.StreamWriter] = []
    never_reads = await asyncio.start_server(lambda _, writer: connections.append(writer), "127.0.0.1", 0)
    async with never_reads:
        url = "http://{}:{}".format(*never_reads.sockets[0].getsockname())
        proxy = await serve_proxy(in_front_of(url, upstream={"timeouts": {"first_byte": 0.3}}))
        form = aiohttp.FormData({"model": "t"})
        form.add_field("file", BytesIO(bytes(30 << 20)), filename="long.wav")
        reply = await proxy.ask("POST", "/v1/audio/transcriptions", data=form)
        assert (reply.status, reply.error["code"]) == (504, "upstream_timeout")
        await proxy.idle()
        for connection in connections:
            connection.close()


async def test_an_upstream_that_falls_silent_in_mid_stream_is_a_timeout_in_the_stream(fault: StartFault) -> None:
    f = await fault(faults.stalls_after(2), upstream={"timeouts": {"idle": 0.05}})
    got = await cut_stream(f.proxy)
    assert got.startswith(b"".join(faults.CHAT.pieces[:2]))
    assert last_error(got)["code"] == "upstream_timeout"
    await f.upstream.exchanges[0].gone.wait()


async def test_the_upstreams_clocks_start_after_the_grant(fault: StartFault) -> None:
    f = await fault(faults.stalls_after(2), upstream={"timeouts": {"first_byte": 0.4, "connect": 0.4}})
    async with f.proxy.raw() as first:
        await first.post(CHAT, chat("t", stream=True))
        await f.upstream.until(1)
        waiting = asyncio.create_task(f.proxy.chat())
        since = (await f.proxy.until(waiting=1))["waiting"][0]
        while since["waited"] < 0.6:  # longer than the upstream would be given
            [since] = (await f.proxy.lease())["waiting"]
        first.hang_up()
        assert (await waiting).status == 200


async def test_a_request_that_holds_too_long_is_504_and_the_upstream_let_go(fault: StartFault) -> None:
    f = await fault(faults.never_answers, lease={"max_hold": 0.05})
    reply = await f.proxy.chat()
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (504, "hold_expired", "false")
    await f.upstream.exchanges[0].gone.wait()


async def test_a_stream_that_holds_too_long_ends_with_an_error_event(fault: StartFault) -> None:
    f = await fault(faults.stalls_after(1), lease={"max_hold": 0.5})
    assert last_error(await cut_stream(f.proxy))["code"] == "hold_expired"
    await f.upstream.exchanges[0].gone.wait()


# Strange answers


async def test_one_byte_at_a_time_arrives_whole(fault: StartFault) -> None:
    f = await fault(faults.one_byte_chunks)
    assert (await f.proxy.chat(stream=True)).body == faults.CHAT.body


async def test_the_upstreams_1xx_are_swallowed(fault: StartFault) -> None:
    f = await fault(faults.early_hints)
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat())
        status, headers = await client.read_head()
        assert (status, await client.read_body(headers)) == (200, faults.TEXT.body)


async def test_an_answer_that_comes_before_the_upload_has_ended_is_passed_on(serve_proxy: Serve) -> None:
    left = asyncio.Event()

    async def answer_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        with suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass
        left.set()
        writer.close()

    async with await asyncio.start_server(answer_early, "127.0.0.1", 0) as server:
        proxy: Served = await serve_proxy(in_front_of("http://{}:{}".format(*server.sockets[0].getsockname())))
        body = json.dumps(chat(filler="x" * (4 << 20))).encode()
        reply = await proxy.ask("POST", CHAT, data=BytesIO(body), headers={"Content-Type": JSON})
        assert (reply.status, reply.body) == (413, b"{}")
        await left.wait()
        await proxy.idle()


async def test_an_upstream_that_answers_json_where_a_stream_was_asked_for_is_passed_on(fault: StartFault) -> None:
    async def json_anyway(exchange: Exchange) -> None:
        await exchange.whole(200, faults.TEXT.body)

    f = await fault(json_anyway)
    reply = await f.proxy.chat(stream=True)
    assert (reply.status, reply.headers["Content-Type"], reply.body) == (200, JSON, faults.TEXT.body)


@pytest.mark.parametrize("encoding", ["gzip", "br"])
async def test_a_compressed_stream_is_passed_on_as_it_is(fault: StartFault, encoding: str) -> None:
    squeezed = bytes(range(256)) * 20

    async def compressed(exchange: Exchange) -> None:
        head = {"Content-Type": SSE, "Content-Encoding": encoding, "Transfer-Encoding": "chunked"}
        await exchange.head(200, head)
        for at in range(0, len(squeezed), 100):
            await exchange.chunk(squeezed[at : at + 100])
        await exchange.end()

    f = await fault(compressed)
    async with f.proxy.http.post(CHAT, json=chat(stream=True), auto_decompress=False) as reply:
        assert (reply.status, reply.headers["Content-Encoding"]) == (200, encoding)
        assert await reply.read() == squeezed


async def test_an_empty_answer_is_an_empty_answer(fault: StartFault) -> None:
    async def nothing(exchange: Exchange) -> None:
        await exchange.head(204, {})

    f = await fault(nothing)
    reply = await f.proxy.chat()
    assert (reply.status, reply.body) == (204, b"")


# Every fault, many at a time


@pytest.mark.parametrize(
    "behaviour",
    [faults.dies_before_headers, faults.dies_in_mid_stream, faults.truncated, faults.error_appended, faults.ok],
    ids=lambda behaviour: behaviour.__name__,
)
async def test_a_fault_that_meets_many_requests_at_once_meets_each_alone(
    fault: StartFault, behaviour: Behaviour
) -> None:
    f = await fault(*[behaviour] * 12, upstream={"max_in_flight": 4})

    async def one(f: Fault, number: int) -> None:
        with suppress(aiohttp.ClientPayloadError):
            await f.proxy.chat(f"m{number % 3}" if number % 4 else "t", stream=True)

    await asyncio.gather(*(one(f, number) for number in range(12)))
    assert len(f.upstream.exchanges) == 12
    assert re.fullmatch(r"\[\]", json.dumps((await f.proxy.lease())["waiting"]))
