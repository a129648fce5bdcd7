"""A proxy over HTTP, and the two things that must hold after every fault."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from importlib.util import find_spec
from typing import Any, Protocol

import pytest

from tests.fakes import FaultyUpstream, faults
from tests.fakes.faulty import Behaviour
from tests.proxy.served import Fault, Served, in_front_of, serve

UVLOOP = frozenset(
    [
        "test_children",
        "test_clients",
        "test_disconnects",
        "test_faults",
        "test_forward",
        "test_keepalive",
        "test_relay",
        "test_refusals",
        "test_websocket",
    ]
)


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The forwarding is tested on the loop that `llama-lease serve` runs on, where there is one."""
    forwards = item.path.stem in UVLOOP
    if forwards and find_spec("uvloop") is not None:
        import uvloop

        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


class StartFault(Protocol):
    """Start an upstream with these behaviours (then it answers well) and a proxy in front; keywords of `in_front_of`."""

    def __call__(self, *behaviours: Behaviour, **sections: Any) -> Awaitable[Fault]: ...


@pytest.fixture
async def serve_proxy(
    caplog: pytest.LogCaptureFixture,
) -> AsyncIterator[Callable[[Mapping[str, Any]], Awaitable[Served]]]:
    """Start proxies from configurations. None of them may log a fault of its own or lose a task's exception."""
    async with AsyncExitStack() as stack:

        async def start(config: Mapping[str, Any]) -> Served:
            proxy = await serve(config)
            stack.push_async_callback(proxy.close)
            return proxy

        yield start
    gc.collect(1)  # a task that failed unseen is told of when it is collected
    ours = ("asyncio", "proxy.app", "proxy.http", "proxy.lease")
    faults_of_ours = [
        record.getMessage()
        for record in caplog.get_records("call")
        if record.levelno >= logging.ERROR and record.name.startswith(ours)
    ]
    assert faults_of_ours == []


@pytest.fixture
async def fault(serve_proxy: Callable[[Mapping[str, Any]], Awaitable[Served]]) -> AsyncIterator[StartFault]:
    """Afterwards the lease is empty and the next request is served."""
    started: list[Fault] = []
    async with AsyncExitStack() as stack:

        async def start(*behaviours: Behaviour, **sections: Any) -> Fault:
            upstream = await stack.enter_async_context(FaultyUpstream(*behaviours, faults.ok))
            proxy = await serve_proxy(in_front_of(upstream.url, **sections))
            started.append(Fault(proxy, upstream))
            return started[-1]

        yield start
        for each in started:
            await each.proxy.idle()
            each.proxy.without_limits()
            reply = await each.proxy.chat("next")
            assert (reply.status, reply.body) == (200, faults.TEXT.body)
            assert await each.proxy.until(holding=0, waiting=0)
