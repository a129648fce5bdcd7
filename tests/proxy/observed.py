"""The real server in front of fakes, for the tests of what it tells about itself."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from proxy.app import RUNTIME, build_app, server_options
from proxy.config import Config
from proxy.runtime import Runtime
from tests.fakes import FakeModel, FakeSpeech, FakeSwapper, FaultyUpstream
from tests.fakes.faults import truncated

KEY = "sk-secret-key"


@dataclass
class Observed:
    """A running server with the groups chat, broken (its answers end too early) and speech."""

    client: aiohttp.ClientSession  # sends KEY
    runtime: Runtime
    swapper: FakeSwapper
    speech: FakeSpeech

    async def post(self, path: str, fields: dict[str, object], **headers: str) -> aiohttp.ClientResponse:
        async with self.client.post(path, json=fields, headers=headers) as response:
            await response.content.readany()
            return response

    async def chat(self, model: str = "qwen", content: str = "hello", **headers: str) -> aiohttp.ClientResponse:
        fields = {"model": model, "stream": True, "messages": [{"role": "user", "content": content}]}
        return await self.post("/v1/chat/completions", fields, **headers)

    async def speak(self, text: str) -> aiohttp.ClientResponse:
        return await self.post("/v1/audio/speech", {"model": "tts", "input": text, "response_format": "wav"})


@asynccontextmanager
async def observed(folder: Path) -> AsyncIterator[Observed]:
    async with FakeSwapper({"qwen": FakeModel()}) as swapper, FaultyUpstream(truncated) as broken:
        settings = Config.model_validate(
            {
                "api_keys": [KEY],
                "data_dir": str(folder),
                "upstreams": {"swapper": {"url": swapper.url}, "broken": {"url": broken.url}},
                "backends": {"fake": {"kind": "hibari"}},
                "groups": {
                    "chat": {"mode": "read", "models": ["qwen"], "upstream": "swapper"},
                    "broken": {"mode": "read", "models": ["broken"], "upstream": "broken"},
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
