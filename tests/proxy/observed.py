"""The real server in front of fakes, for the tests of what it tells about itself."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from proxy.app import RUNTIME, build_app, server_options
from proxy.config import Config
from proxy.metrics import PREFIX
from proxy.runtime import Runtime
from tests.fakes import FakeModel, FakeSpeech, FakeSwapper, FaultyUpstream
from tests.fakes.faults import loading, truncated

KEY = "sk-secret-key"


@dataclass
class Observed:
    """A running server with the groups chat, broken (its answers end too early), slow (never loads) and speech."""

    client: aiohttp.ClientSession  # sends KEY
    runtime: Runtime
    swapper: FakeSwapper
    speech: FakeSpeech

    async def post(self, path: str, fields: dict[str, object], **headers: str) -> aiohttp.ClientResponse:
        async with self.client.post(path, json=fields, headers=headers) as response:
            await response.read()
            return response

    async def chat(self, model: str = "qwen", content: str = "hello", **headers: str) -> aiohttp.ClientResponse:
        fields = {"model": model, "stream": True, "messages": [{"role": "user", "content": content}]}
        return await self.post("/v1/chat/completions", fields, **headers)

    def value(self, name: str, **labels: str) -> float:
        """The number of one series on the metrics page; 0 where there is none."""
        page = text_string_to_metric_families(self.runtime.metrics.render()[0].decode())
        samples = [sample for family in page for sample in family.samples if sample.name == PREFIX + name]
        return next((sample.value for sample in samples if sample.labels == labels), 0.0)

    async def reaches(self, value: float, name: str, **labels: str) -> None:
        """Wait until a series has this value: what the server does after a client has gone, nobody is told."""
        while True:
            if self.value(name, **labels) == value:
                return
            await asyncio.sleep(0.01)

    async def speak(self, text: str) -> aiohttp.ClientResponse:
        return await self.post("/v1/audio/speech", {"model": "tts", "input": text, "response_format": "wav"})


@asynccontextmanager
async def observed(folder: Path) -> AsyncIterator[Observed]:
    async with (
        FakeSwapper({"qwen": FakeModel()}) as swapper,
        FaultyUpstream(truncated) as broken,
        FaultyUpstream(loading()) as slow,
    ):
        settings = Config.model_validate(
            {
                "api_keys": [KEY],
                "data_dir": str(folder),
                "leases": {"gpu0": {"heartbeat": 0.01, "heartbeat_interval": 0.01}},
                "upstreams": {
                    "swapper": {"url": swapper.url},
                    "broken": {"url": broken.url},
                    "slow": {"url": slow.url, "load_timeout": 0.05, "failed_load_backoff": 60},
                },
                "backends": {"fake": {"kind": "hibari"}},
                "groups": {
                    "chat": {"mode": "read", "models": ["qwen"], "upstream": "swapper"},
                    "broken": {"mode": "read", "models": ["broken"], "upstream": "broken"},
                    "slow": {"mode": "read", "models": ["slow"], "upstream": "slow"},
                    "speech": {"mode": "write", "models": ["tts"], "backend": "fake"},
                },
            }
        )
        app = build_app(settings)
        runtime = app[RUNTIME]
        runtime.backends["fake"] = speech = FakeSpeech("fake")
        runner = web.AppRunner(app, shutdown_timeout=0.1, **server_options())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        headers = {"Authorization": f"Bearer {KEY}"}
        try:
            async with aiohttp.ClientSession(f"http://{host}:{port}", headers=headers) as client:
                yield Observed(client, runtime, swapper, speech)
        finally:
            await runner.cleanup()
