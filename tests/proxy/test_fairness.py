"""Chat streams started every second, each three seconds long, and one speech request in between.

On the swapper alone some stream always runs, so the speech request waits until the streams stop coming. Behind the
proxy it waits for the streams that ran when it came, and no longer. Seconds are ticks of the test: gates let the
streams end, and the swapper's log tells who was served when.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import pytest

from tests.fakes import FakeSwapper
from tests.proxy.served import CHAT, Served, chat, in_front_of

Serve = Callable[[Mapping[str, Any]], Awaitable[Served]]
LENGTH, SPEECH_AT, TICKS = 3, 5, 16


class Load:
    """The load on one URL. `came(count)` returns when so many requests have arrived there or wait in front."""

    def __init__(self, fake: FakeSwapper, http: aiohttp.ClientSession, came: Callable[[int], Awaitable[None]]) -> None:
        self.fake = fake
        self._http = http
        self._came = came
        self.running = 0
        self.since = 0
        """Streams that ran, and events that had happened, when the speech request came."""

    async def run(self, each_tick: Callable[["Load"], None]) -> None:
        gates = [self.fake.hold("q", after=1) for _ in range(TICKS)]
        streams: list[asyncio.Task[bytes]] = []
        speech: asyncio.Task[bytes] | None = None
        for tick in range(TICKS):
            if tick >= LENGTH:
                gates[tick - LENGTH].open()
                await streams[tick - LENGTH]
            streams.append(asyncio.create_task(self._ask(CHAT, chat("q", stream=True))))
            await self._came(len(streams) + (speech is not None))
            if tick == SPEECH_AT:
                self.running, self.since = self.fake.in_flight["q"], len(self.fake.events)
                speech = asyncio.create_task(self._ask("/v1/audio/speech", {"model": "t", "input": "Hello."}))
                await self._came(len(streams) + 1)
            each_tick(self)
        for gate in gates:
            gate.open()
        assert speech is not None
        await asyncio.gather(*streams, speech)

    def since_speech_came(self, *kinds: str) -> list[str]:
        """What has happened since then: "served q", "done q", "load t", ..."""
        return [f"{event.kind} {event.model}" for event in self.fake.events[self.since :] if event.kind in kinds]

    async def _ask(self, path: str, fields: dict[str, Any]) -> bytes:
        async with self._http.post(path, json=fields) as reply:
            assert reply.status == 200
            return await reply.read()


async def test_on_the_swapper_alone_the_speech_request_starves_until_the_streams_stop() -> None:
    async with FakeSwapper(["q", "t"], matrix="q | t") as fake, aiohttp.ClientSession(fake.url) as http:
        load = Load(fake, http, lambda count: fake.until("arrived", count))

        def starves(load: Load) -> None:
            if load.since:  # it has come
                assert fake.in_flight["q"] >= LENGTH - 1
                assert fake.loads == ["q"]

        await load.run(starves)
        served = load.since_speech_came("served")
        assert served == ["served q"] * (TICKS - SPEECH_AT - 1) + ["served t"]


@pytest.mark.parametrize("lease", [{"order": "fifo"}, {"order": "phases"}], ids=["fifo", "phases"])
async def test_behind_the_proxy_it_waits_for_the_streams_that_ran_when_it_came_and_no_longer(
    serve_proxy: Serve, lease: dict[str, Any]
) -> None:
    async with FakeSwapper(["q", "t"], matrix="q | t") as fake:
        proxy = await serve_proxy(in_front_of(fake.url, lease=lease))

        async def came(count: int) -> None:
            while True:
                waiting = len((await proxy.lease())["waiting"])
                if len(fake.events_of("arrived")) + waiting == count:
                    return
                await asyncio.sleep(0.002)

        load = Load(fake, proxy.http, came)
        await load.run(lambda _: None)
        until_served = load.since_speech_came("served", "done", "load")
        assert load.running == LENGTH
        assert until_served[: load.running + 2] == ["done q"] * load.running + ["load t", "served t"]
        assert until_served.count("served q") == TICKS - SPEECH_AT - 1
        await proxy.idle()
