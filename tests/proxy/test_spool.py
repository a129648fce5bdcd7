import asyncio
import threading
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy import threads
from proxy.spool import Closed, Spool


async def read_all(spool: Spool) -> bytes:
    data = b""
    while (part := await spool.take(7)) is not None:
        data += part
    return data


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(1, 60), st.integers(1, 60))
def test_bytes_come_out_as_they_went_in(parts: list[bytes], memory: int, limit: int) -> None:
    async def story() -> bytes:
        with closing(Spool(memory=memory, limit=limit)) as spool:

            def write() -> None:
                for part in parts:
                    spool.put(part)
                spool.finish()

            writing = asyncio.create_task(asyncio.to_thread(write))
            data = await read_all(spool)
            await writing
            return data

    assert asyncio.run(story()) == b"".join(parts)


async def test_an_error_is_seen_after_the_bytes_before_it() -> None:
    with closing(Spool()) as spool:
        spool.put(b"abc")
        spool.finish(RuntimeError("broken"))
        spool.finish(None)
        assert await read_all(spool) == b"abc"
        assert isinstance(spool.error, RuntimeError)


async def test_a_writer_that_waits_for_room_is_stopped_by_close() -> None:
    spool = Spool(limit=1)
    spool.put(b"ab")
    writing = asyncio.create_task(asyncio.to_thread(spool.put, b"c"))
    await asyncio.sleep(0)
    spool.close()
    with pytest.raises(Closed):
        await writing
    with pytest.raises(Closed):
        spool.put(b"d")


async def test_a_closed_spool_is_not_taken_for_a_finished_one() -> None:
    spool = Spool()
    reading = asyncio.create_task(spool.take())
    await asyncio.sleep(0)
    spool.close()
    spool.finish()
    with pytest.raises(Closed):
        await reading


async def test_a_reader_that_is_cancelled_loses_nothing() -> None:
    with closing(Spool()) as spool:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await spool.take()
        spool.put(b"abc")
        assert await spool.take() == b"abc"


async def test_a_cancelled_caller_waits_for_its_thread() -> None:
    started, stop, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        stop.wait(30)
        ended.set()

    caller = asyncio.create_task(threads.run(work, stop.set))
    await asyncio.to_thread(started.wait, 30)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()


async def test_a_second_cancellation_does_not_cut_the_wait_short() -> None:
    started, stopping, ended = threading.Event(), threading.Event(), threading.Event()
    release = threading.Event()

    def work() -> None:
        started.set()
        release.wait(30)
        ended.set()

    caller = asyncio.create_task(threads.run(work, stopping.set))
    await asyncio.to_thread(started.wait, 30)
    caller.cancel()
    await asyncio.to_thread(stopping.wait, 30)
    caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()


async def test_a_thread_that_never_stops_is_given_up_with_an_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    started, release = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        release.wait(30)

    caller = asyncio.create_task(threads.run(work, lambda: None, patience=0.01))
    await asyncio.to_thread(started.wait, 30)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert "did not stop" in caplog.text
    release.set()


async def test_a_threads_result_and_error_come_back() -> None:
    assert await threads.run(lambda: 7, lambda: None) == 7
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0, lambda: None)
