"""Clients that go away in every phase, and slow ones. After each test the lease is empty and the next request is served."""

import asyncio
import json

import pytest

from tests.fakes import Exchange, faults
from tests.fakes.answers import JSON, event
from tests.proxy.conftest import StartFault
from tests.proxy.served import CHAT, Served, chat

# The client goes away


async def counted(proxy: Served) -> tuple[dict[str, float], float]:
    """Clients that went away, by phase, and errors blamed on upstreams."""
    page = (await proxy.ask("GET", "/metrics")).body.decode()
    lines = [line.removeprefix("llama_lease_").rsplit(" ", 1) for line in page.splitlines()]
    gone = {name: float(n) for name, n in lines if name.startswith("client_disconnects_total{")}
    blamed = sum(float(n) for name, n in lines if name.startswith("upstream_errors_total{"))
    return {name.split('"')[1]: n for name, n in gone.items() if n}, blamed


async def test_a_client_that_goes_is_counted_by_phase_and_is_no_upstreams_error(
    fault: StartFault, caplog: pytest.LogCaptureFixture
) -> None:
    f = await fault(faults.never_answers, faults.stalls_after(1))
    for number in (1, 2):
        async with f.proxy.raw() as running, f.proxy.raw() as queued:
            await running.post(CHAT, chat("t", stream=True))
            await f.upstream.until(number)
            if number == 2:
                await running.read_until(faults.CHAT.pieces[0])
            await queued.post(CHAT, chat("t"))
            await f.proxy.until(waiting=1)
            queued.hang_up(reset=True)
            await f.proxy.until(waiting=0)
        await f.proxy.idle()
    assert await counted(f.proxy) == ({"queued": 2.0, "upstream": 1.0, "streaming": 1.0}, 0.0)
    assert not [record for record in caplog.records if record.levelname != "INFO" and record.name != "asyncio"]


async def test_a_client_that_goes_while_it_uploads_was_never_in_line(fault: StartFault) -> None:
    f = await fault(faults.ok)
    async with f.proxy.raw() as client:
        await client.head("POST", CHAT, 1000, Content_Type=JSON)
        await client.send(b'{"model": "t"')
        assert (await f.proxy.lease())["holders"] == []
    assert (await f.proxy.chat()).status == 200
    assert len(f.upstream.exchanges) == 1


@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
async def test_a_queued_client_that_goes_leaves_the_line_and_the_upstream_never_hears_of_it(
    fault: StartFault, reset: bool
) -> None:
    f = await fault(faults.stalls_after(1))
    async with f.proxy.raw() as holder, f.proxy.raw() as waiter:
        await holder.post(CHAT, chat(stream=True))
        await f.upstream.until(1)
        await waiter.post("/v1/audio/speech", {"model": "t", "input": "x"})
        await f.proxy.until(waiting=1)
        behind = asyncio.create_task(f.proxy.chat("behind"))
        await f.proxy.until(waiting=2)
        waiter.hang_up(reset=reset)
        assert (await behind).status == 200  # the writer in front of it was all that kept it waiting
        assert (await f.proxy.lease())["holders"] != []
    bodies = [json.loads(exchange.body)["model"] for exchange in f.upstream.exchanges]
    assert bodies == ["m", "behind"]


@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_goes_before_the_headers_ends_the_exchange(
    fault: StartFault, stream: bool, reset: bool
) -> None:
    f = await fault(faults.never_answers)
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat("t", stream=stream))
        exchange = await f.upstream.until(1)
        client.hang_up(reset=reset)
        await exchange.gone.wait()
    await f.proxy.idle()


@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
async def test_a_client_that_goes_between_bytes_ends_the_exchange(fault: StartFault, reset: bool) -> None:
    f = await fault(faults.stalls_after(2))
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat("t", stream=True))
        await client.read_until(faults.CHAT.pieces[1])
        client.hang_up(reset=reset)
        await (await f.upstream.until(1)).gone.wait()
    await f.proxy.idle()


@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
async def test_a_client_that_goes_inside_a_body_ends_the_exchange(fault: StartFault, reset: bool) -> None:
    async def half(exchange: Exchange) -> None:
        await exchange.head(200, {"Content-Type": JSON, "Content-Length": "1000"})
        await exchange.raw(b"{")
        await exchange.gone.wait()

    f = await fault(half)
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat("t"))
        await client.read_until(b"{")
        client.hang_up(reset=reset)
        await (await f.upstream.until(1)).gone.wait()
    await f.proxy.idle()


async def test_a_client_that_goes_while_the_answer_pours_in_ends_the_exchange(fault: StartFault) -> None:
    f = await fault(faults.endless)
    async with f.proxy.raw(small_buffers=True) as client:
        await client.post(CHAT, chat("t", stream=True))
        await client.read(100)
        client.hang_up(reset=True)
        await (await f.upstream.until(1)).gone.wait()
    await f.proxy.idle()


async def test_a_client_that_goes_while_429_is_waited_out_ends_the_wait(fault: StartFault) -> None:
    f = await fault(faults.busy(100))
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat("t"))
        await f.upstream.until(1)
        await f.proxy.until(holding=1)
    await f.proxy.idle()


async def test_many_clients_that_go_in_every_phase_leave_nothing_behind(fault: StartFault) -> None:
    f = await fault(*[faults.stalls_after(1)] * 3)
    async with f.proxy.raw() as a, f.proxy.raw() as b, f.proxy.raw() as c:
        running = [a, b, c]
        for client in running:
            await client.post(CHAT, chat(stream=True))
        await f.upstream.until(3)
        waiting = [f.proxy.raw() for _ in range(20)]
        for number, client in enumerate(waiting):
            await client.__aenter__()
            await client.post(CHAT, chat(f"m{number}" if number % 2 else "t", stream=True))
        await f.proxy.until(waiting=20)
        for first, second in zip(waiting[:10], waiting[10:], strict=True):
            first.hang_up(reset=True)
            second.hang_up()
        await f.proxy.until(waiting=0, holding=3)
    await f.proxy.idle()


# Slow clients do not hold the lease


async def test_a_slow_uploader_is_not_in_line(fault: StartFault) -> None:
    f = await fault(faults.ok)
    body = json.dumps(chat("t")).encode()
    async with f.proxy.raw() as slow:
        await slow.head("POST", CHAT, len(body), Content_Type=JSON)
        await slow.send(body[:10])
        assert (await f.proxy.chat("t")).status == 200
        lease = await f.proxy.lease()
        assert (lease["holders"], lease["waiting"]) == ([], [])
        await slow.send(body[10:])
        status, headers = await slow.read_head()
        assert (status, await slow.read_body(headers)) == (200, faults.TEXT.body)


async def test_a_slow_reader_does_not_hold_the_lease(fault: StartFault) -> None:
    size = 20 << 20
    f = await fault(faults.huge(size))
    async with f.proxy.raw(small_buffers=True) as slow:
        await slow.post("/v1/audio/speech", {"model": "t", "input": "x"})
        _, headers = await slow.read_head()
        await f.proxy.idle()  # the upstream has ended; the reader has read nothing
        assert (await f.proxy.chat("t2")).status == 200
        body = await slow.read(size)
        assert (headers["content-length"], body) == (str(size), bytes(range(256)) * (size // 256))


async def test_a_slow_reader_of_a_stream_gets_all_of_it_and_its_end(fault: StartFault) -> None:
    events = [event({"choices": [{"index": 0, "delta": {"content": "x" * 1000}}]}) for _ in range(6000)]

    async def long(exchange: Exchange) -> None:
        await exchange.open_stream()
        for at in range(0, len(events), 100):
            await exchange.chunk(b"".join(events[at : at + 100]))
        await exchange.chunk(event("[DONE]"))
        await exchange.end()

    f = await fault(long)
    async with f.proxy.raw(small_buffers=True) as slow:
        await slow.post(CHAT, chat("t", stream=True))
        _, headers = await slow.read_head()
        await f.proxy.idle()
        assert await slow.read_body(headers) == b"".join(events) + event("[DONE]")


async def test_a_slow_reader_of_a_stream_that_broke_off_learns_of_it(fault: StartFault) -> None:
    events = [event({"choices": [{"index": 0, "delta": {"content": "x" * 1000}}]}) for _ in range(6000)]

    async def broken(exchange: Exchange) -> None:
        await exchange.open_stream()
        await exchange.chunk(b"".join(events))
        await exchange.end()

    f = await fault(broken)
    async with f.proxy.raw(small_buffers=True) as slow:
        await slow.post(CHAT, chat("t", stream=True))
        await slow.read_head()
        await f.proxy.idle()
        got = await slow.read_rest()
    assert b"upstream_truncated" in got[-1000:]
    assert not got.endswith(b"0\r\n\r\n")


async def test_a_reader_that_goes_after_the_lease_has_ended_leaves_nothing(fault: StartFault) -> None:
    f = await fault(faults.huge(20 << 20))
    async with f.proxy.raw(small_buffers=True) as slow:
        await slow.post(CHAT, chat("t"))
        await slow.read_head()
        await f.proxy.idle()
        slow.hang_up(reset=True)
    assert (await f.proxy.chat()).status == 200
