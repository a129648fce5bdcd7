"""The real server in front of a stand-in for llama-swap, with clients of every kind that go on until the block ends."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

from proxy import config
from proxy.app import RUNTIME, build_app, server_options
from proxy.serve import reload_config
from tests.fakes import FakeModel, FakeSpeech, FakeSwapper, FaultyUpstream
from tests.fakes.faults import truncated

MODELS = {
    "qwen": FakeModel(load=0.05, work=0.15, events=4),
    "vl": FakeModel(load=0.05, work=0.1, events=2),
    "embed": FakeModel(work=0.01),
}


def configuration(swapper: str, broken: str) -> dict[str, Any]:
    """Four groups in front of one GPU, and an upstream that ends its answers too early."""
    return {
        # A short queue, so that it is full at times; signs of life at once, so that waiting clients get some.
        "leases": {"gpu0": {"max_waiting": 3, "heartbeat": 0.02, "heartbeat_interval": 0.05}},
        "upstreams": {"swapper": {"url": swapper, "exclusive": [["qwen", "vl"]]}, "broken": {"url": broken}},
        "backends": {"fake": {"kind": "hibari"}},
        "groups": {
            "chat": {"mode": "read", "models": ["qwen"], "upstream": "swapper"},
            "vision": {"mode": "read", "models": ["vl"], "upstream": "swapper"},
            "embeddings": {"mode": "none", "models": ["embed"], "upstream": "swapper"},
            "speech": {"mode": "write", "models": ["tts"], "backend": "fake"},
            "truncated": {"mode": "none", "models": ["broken"], "upstream": "broken"},
        },
    }


class Clients:
    """What the clients do, again and again. Errors that the server answers with are part of the load."""

    def __init__(self, session: aiohttp.ClientSession, file: Path, reload: Callable[[], bool]) -> None:
        self._session, self._file, self._reload = session, file, reload
        self._good = file.read_text()

    def all(self) -> list[Coroutine[Any, Any, None]]:
        return [
            *(self.again(lambda: self.chat("qwen")) for _ in range(2)),
            self.again(lambda: self.chat("vl")),
            self.again(lambda: self.chat("broken")),
            self.again(self.embeddings),
            self.again(self.speech),
            self.again(self.impatient),
            self.again(self.leaves),
            self.again(self.crowd),
            self.again(self.reloads),
        ]

    async def again(self, once: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await once()
            await asyncio.sleep(0.05)

    async def chat(self, model: str, **headers: str) -> None:
        messages = [{"role": "user", "content": "hello"}]
        await self._post("/v1/chat/completions", {"model": model, "stream": True, "messages": messages}, headers)

    async def embeddings(self) -> None:
        await self._post("/v1/embeddings", {"model": "embed", "input": "hello"})

    async def speech(self) -> None:
        await self._post("/v1/audio/speech", {"model": "tts", "input": "Hello. How are you?", "response_format": "wav"})

    async def impatient(self) -> None:
        await self.chat("vl", **{"X-Max-Wait": "0"})

    async def leaves(self) -> None:
        """Goes away while it waits, or in the middle of the answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await self.chat("qwen")

    async def crowd(self) -> None:
        """More at once than may wait."""
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(self.speech())
        await asyncio.sleep(0.5)

    async def reloads(self) -> None:
        """A change that is accepted, then one that is refused."""
        self._file.write_text(self._good + "drain_timeout: 1\n")
        self._reload()
        self._file.write_text(self._good + "drain_timeout: many\n")
        self._reload()
        self._file.write_text(self._good)
        self._reload()
        await asyncio.sleep(0.5)

    async def _post(self, path: str, fields: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        with contextlib.suppress(aiohttp.ClientPayloadError):  # an answer that was cut, as it should be
            async with self._session.post(path, json=fields, headers=headers) as response:
                await response.read()


@asynccontextmanager
async def mixed_load(folder: Path) -> AsyncIterator[str]:
    """host:port of a server that is kept busy. `folder`: for its configuration."""
    async with FakeSwapper(MODELS, matrix="(qwen | vl) & embed") as swapper, FaultyUpstream(truncated) as broken:
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(configuration(swapper.url, broken.url)))
        app = build_app(config.load(file))
        app[RUNTIME].backends["fake"] = FakeSpeech("fake", samples=120)
        runner = web.AppRunner(app, shutdown_timeout=0.1, **server_options())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
            clients = Clients(session, file, lambda: reload_config(app[RUNTIME])).all()
            tasks = [asyncio.create_task(client) for client in clients]
            try:
                yield f"{host}:{port}"
                assert [task for task in tasks if task.done()] == []
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await runner.cleanup()
