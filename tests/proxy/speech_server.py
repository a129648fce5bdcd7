"""The real server with a fake voice of its own ("tts"), and a fake swapper with chat ("qwen") and speech ("chatter")."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from proxy.app import RUNTIME, build_app, server_options
from proxy.config import Config
from proxy.runtime import Runtime
from tests.fakes import FakeModel, FakeSpeech, FakeSwapper


@dataclass
class SpeechServer:
    """`client` sends no key, or the first of `keys`."""

    client: aiohttp.ClientSession
    runtime: Runtime
    swapper: FakeSwapper
    speech: FakeSpeech
    url: str

    async def json(self, method: str, path: str, **options: Any) -> Any:
        """The body of an answer that must be a success."""
        async with self.client.request(method, path, **options) as reply:
            assert reply.ok, await reply.text()
            return await reply.json()

    async def error(self, method: str, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
        """Status and error object of an answer that must be a failure."""
        async with self.client.request(method, path, **options) as reply:
            assert not reply.ok
            error = (await reply.json())["error"]
            assert set(error) == {"message", "type", "param", "code"}
            return reply.status, error

    async def lease_is_free(self) -> bool:
        leases = (await self.json("GET", "/lease"))["leases"]
        return not any(lease["holders"] or lease["waiting"] for lease in leases.values())


@asynccontextmanager
async def speech_server(
    folder: Path, voice: FakeSpeech | None = None, swapper: FakeSwapper | None = None, **settings: Any
) -> AsyncIterator[SpeechServer]:
    """`settings`: top-level sections of the configuration, on top of the usual ones."""
    speech = voice if voice is not None else FakeSpeech()
    swapper = swapper if swapper is not None else FakeSwapper({"qwen": FakeModel(), "chatter": FakeModel(load=0.01)})
    async with swapper:
        config = Config.model_validate(_config(folder, swapper.url) | settings)
        app = build_app(config)
        runtime = app[RUNTIME]
        runtime.backends["fake"] = speech
        runner = web.AppRunner(app, shutdown_timeout=0.1, **server_options())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        headers = {"Authorization": f"Bearer {config.api_keys[0]}"} if config.api_keys else {}
        try:
            async with aiohttp.ClientSession(f"http://{host}:{port}", headers=headers) as client:
                yield SpeechServer(client, runtime, swapper, speech, f"http://{host}:{port}")
        finally:
            await runner.cleanup()


def _config(folder: Path, upstream: str) -> dict[str, Any]:
    return {
        "data_dir": os.fspath(folder),
        "upstreams": {"swapper": {"url": upstream}},
        "backends": {"fake": {"kind": "hibari"}},
        "groups": {
            "chat": {"mode": "read", "models": ["qwen"], "upstream": "swapper"},
            "speech": {"mode": "write", "models": ["tts", "tts-again"], "backend": "fake"},
            "far-speech": {"mode": "write", "models": ["chatter"], "upstream": "swapper"},
        },
        "aliases": {"tts-1": "tts", "far": "chatter"},
    }
