"""Who is served when, over HTTP: llama-lease in front of a swapper that keeps llama-swap's unfair rules."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.fakes import FakeSwapper
from tests.fronted import Front, in_front_of, until

ORDERS = [{"order": "fifo"}, {"order": "phases", "slice": 0}]
"""No slice: a newcomer may never enter a room that somebody else waits for, however fast the test runs."""


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def ask(http: aiohttp.ClientSession, url: str, model: str) -> bytes:
    """A chat stream, or speech for the model t. The whole answer."""
    path, said = "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    if model == "t":
        path, said = "/v1/audio/speech", {"input": "Hello."}
    async with http.post(url + path, json={"model": model, **said}) as reply:
        body = await reply.read()
        assert reply.status == 200, body
        return body


class Load:
    """Chat streams started every second, each three seconds long, and one speech request in between.

    Seconds are ticks of the test: gates let the streams end, and the swapper's log tells who was served when.
    `send` is `ask` without its model; `waiting` tells how many requests wait in front of the swapper.
    """

    LENGTH, SPEECH_AT, TICKS = 3, 5, 16

    def __init__(
        self, fake: FakeSwapper, send: Callable[[str], Coroutine[Any, Any, bytes]], waiting: Callable[[], int]
    ) -> None:
        self.fake = fake
        self._send = send
        self._waiting = waiting
        self._sent: list[asyncio.Task[bytes]] = []
        self.running = 0
        self.since = 0
        """Streams that ran, and events that had happened, when the speech request came."""

    async def run(self, each_tick: Callable[[], None] = lambda: None) -> None:
        gates = [self.fake.hold("q", after=1) for _ in range(self.TICKS)]
        streams: list[asyncio.Task[bytes]] = []
        for tick in range(self.TICKS):
            if tick >= self.LENGTH:
                gates[tick - self.LENGTH].open()
                await streams[tick - self.LENGTH]
            streams.append(await self._come("q"))
            if tick == self.SPEECH_AT:
                self.running, self.since = self.fake.in_flight["q"], len(self.fake.events)
                await self._come("t")
            each_tick()
        for gate in gates:
            gate.open()
        await asyncio.gather(*self._sent)

    def since_speech_came(self, *kinds: str) -> list[str]:
        """What has happened since then: "served q", "done q", "load t", ..."""
        return [f"{event.kind} {event.model}" for event in self.fake.events[self.since :] if event.kind in kinds]

    async def _come(self, model: str) -> asyncio.Task[bytes]:
        """Send, and return when the request has arrived at the swapper or waits in front."""
        self._sent.append(asyncio.create_task(self._send(model)))
        await until(lambda: len(self.fake.events_of("arrived")) + self._waiting() == len(self._sent))
        return self._sent[-1]


async def test_on_the_swapper_alone_speech_starves_until_the_streams_stop(http: aiohttp.ClientSession) -> None:
    async with FakeSwapper(["q", "t"], matrix="q | t") as fake:
        load = Load(fake, partial(ask, http, fake.url), lambda: 0)

        def starves() -> None:
            if load.since:  # it has come
                assert fake.in_flight["q"] >= load.LENGTH - 1
                assert fake.loads == ["q"]

        await load.run(starves)
        served = load.since_speech_came("served")
        assert served == ["served q"] * (load.TICKS - load.SPEECH_AT - 1) + ["served t"]


@pytest.mark.parametrize("lease", ORDERS, ids=lambda lease: lease["order"])
async def test_among_the_same_streams_speech_waits_for_those_that_ran_when_it_came_and_no_longer(
    http: aiohttp.ClientSession, tmp_path: Path, lease: dict[str, Any]
) -> None:
    async with (
        FakeSwapper(["q", "t"], matrix="q | t") as fake,
        in_front_of(fake, tmp_path, speech="t", **lease) as front,
    ):
        load = Load(fake, partial(ask, http, front.url), lambda: len(front.lease.snapshot().waiting))
        await load.run()
        until_served = load.since_speech_came("served", "done", "load")
        assert load.running == load.LENGTH
        assert until_served[: load.running + 2] == ["done q"] * load.running + ["load t", "served t"]
        assert until_served.count("served q") == load.TICKS - load.SPEECH_AT - 1
        await front.empty()


@pytest.mark.parametrize("lease", ORDERS, ids=lambda lease: lease["order"])
@pytest.mark.parametrize("other", ["t", "v"])
async def test_a_request_for_another_model_waits_for_the_streams_that_ran_when_it_came_and_no_longer(
    http: aiohttp.ClientSession, tmp_path: Path, lease: dict[str, Any], other: str
) -> None:
    async with (
        FakeSwapper(["q", "v", "t", "e"], matrix="(q | v | t) & e") as fake,
        in_front_of(fake, tmp_path, speech="t", **lease) as front,
    ):
        gates = [fake.hold("q", after=1) for _ in range(2)]
        running = [asyncio.create_task(ask(http, front.url, "q")) for _ in gates]
        for gate in gates:
            await gate.reached.wait()
        waits = asyncio.create_task(ask(http, front.url, other))
        await front.waiting(1)
        later = [asyncio.create_task(ask(http, front.url, "q")) for _ in range(3)]
        await front.waiting(4)
        gates[0].open()
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        assert fake.loads == ["q"]
        gates[1].open()
        await asyncio.gather(waits, *running, *later)
        assert [event.model for event in fake.events_of("served")] == ["q", "q", other, "q", "q", "q"]
        await front.empty()


@pytest.mark.parametrize("other", ["t", "v"])
async def test_nobody_starves_under_a_load_that_never_stops(
    http: aiohttp.ClientSession, tmp_path: Path, other: str
) -> None:
    async with (
        FakeSwapper(["q", "v", "t"], matrix="q | v | t") as fake,
        in_front_of(fake, tmp_path, speech="t", order="phases", slice=0) as front,
    ):
        served = asyncio.Event()

        async def stream() -> None:
            while not served.is_set():
                await ask(http, front.url, "q")

        streams = [asyncio.create_task(stream()) for _ in range(3)]
        await fake.until("done", 5)
        waits = asyncio.create_task(ask(http, front.url, other))
        await waits  # would never end on the swapper alone: some stream always runs
        served.set()
        await asyncio.gather(*streams)
        await front.empty()


@pytest.mark.parametrize(
    ("lease", "loads"), [({"order": "phases"}, "abc"), ({"order": "fifo"}, "abacabc")], ids=["phases", "fifo"]
)
async def test_a_b_a_a_c_a_b_c_within_one_load(
    http: aiohttp.ClientSession, tmp_path: Path, lease: dict[str, Any], loads: str
) -> None:
    async with FakeSwapper(["a", "b", "c"]) as fake, in_front_of(fake, tmp_path, **lease) as front:
        gate = fake.hold_load("a")
        asked = []
        for count, model in enumerate("abaacabc"):
            asked.append(asyncio.create_task(ask(http, front.url, model)))
            await until(lambda sent=count: _known(front) == sent + 1)  # type: ignore[misc]
        gate.open()
        await asyncio.gather(*asked)
        assert "".join(fake.loads) == loads


def _known(front: Front) -> int:
    seen = front.lease.snapshot()
    return len(seen.waiting) + len(seen.holders)


async def test_a_router_that_kills_on_a_swap_never_gets_to(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with FakeSwapper(["q", "v", "t"], kills=True) as fake, in_front_of(fake, tmp_path, speech="t") as front:
        chosen = random.Random(6)
        gate = fake.hold(after=1)
        asked = [asyncio.create_task(ask(http, front.url, chosen.choice("qvt"))) for _ in range(40)]
        await gate.reached.wait()
        await until(lambda: _known(front) == 40)
        gate.open()
        await asyncio.gather(*asked)
        assert fake.events_of("killed") == []
        assert len(fake.events_of("done")) == 40


async def test_an_always_resident_model_waits_for_nobody(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with (
        FakeSwapper(["q", "v", "e"], matrix="(q | v) & e") as fake,
        in_front_of(fake, tmp_path, order="phases", slice=0) as front,
    ):
        gate = fake.hold("q", after=1)
        running = asyncio.create_task(ask(http, front.url, "q"))
        await gate.reached.wait()
        waits = asyncio.create_task(ask(http, front.url, "v"))
        await front.waiting(1)
        await ask(http, front.url, "e")
        assert not waits.done()
        gate.open()
        await asyncio.gather(running, waits)


async def test_a_client_that_goes_gives_the_gpu_to_the_next_at_once(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with (
        FakeSwapper(["q", "t"], matrix="q | t") as fake,
        in_front_of(fake, tmp_path, speech="t", order="fifo") as front,
    ):
        gate = fake.hold("q", after=1)
        running = asyncio.create_task(ask(http, front.url, "q"))
        await gate.reached.wait()
        queued = asyncio.create_task(ask(http, front.url, "t"))
        await front.waiting(1)
        behind = asyncio.create_task(ask(http, front.url, "t"))
        await front.waiting(2)
        queued.cancel()
        await front.waiting(1)
        running.cancel()
        await behind
        assert [(event.kind, event.model) for event in fake.events_of("gone", "done")] == [("gone", "q"), ("done", "t")]
