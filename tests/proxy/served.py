"""The real server on a free port, and what tests do with it over HTTP."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from proxy.app import RUNTIME, build_app, server_options
from proxy.config import Config, LeaseConfig, Upstream
from proxy.connections import listen
from proxy.runtime import Runtime
from tests.fakes import FaultyUpstream, RawClient

CHAT = "/v1/chat/completions"


class Reply(NamedTuple):
    """A whole answer."""

    status: int
    headers: "CIMultiDict[str]"
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error object, which has its four keys."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


@dataclass(eq=False)
class Served:
    """A running proxy. `http` is a client of it, without a key."""

    url: str
    runtime: Runtime
    runner: web.AppRunner
    listening: asyncio.Server
    http: aiohttp.ClientSession

    async def ask(self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **options: Any) -> Reply:
        """One request and its whole answer."""
        async with self.http.request(method, path, headers=headers, **options) as reply:
            return Reply(reply.status, CIMultiDict(reply.headers), await reply.read())

    async def chat(self, model: str = "m", *, path: str = CHAT, headers: Mapping[str, str] | None = None,
                   **fields: Any) -> Reply:  # fmt: skip
        """A chat request and its whole answer. Raises aiohttp.ClientPayloadError when the answer is cut."""
        return await self.ask("POST", path, json=chat(model, **fields), headers=headers)

    async def lease(self, name: str = "gpu0") -> dict[str, Any]:
        """The lease as GET /lease tells it."""
        snapshot: dict[str, Any] = json.loads((await self.ask("GET", "/lease")).body)["leases"][name]
        return snapshot

    async def until(self, *, holding: int | None = None, waiting: int | None = None) -> dict[str, Any]:
        """The lease, as soon as so many hold it and so many wait."""
        while True:
            lease = await self.lease()
            if holding in (None, len(lease["holders"])) and waiting in (None, len(lease["waiting"])):
                return lease
            await asyncio.sleep(0.002)

    async def idle(self) -> None:
        """Returns when nobody holds and nobody waits."""
        await self.until(holding=0, waiting=0)

    def without_limits(self) -> None:
        """Lift what the test may have set so low that the next request could meet it, too."""
        config = self.runtime.config
        upstreams = {name: Upstream(url=upstream.url) for name, upstream in config.upstreams.items()}
        self.runtime.apply(config.model_copy(update={"leases": {"gpu0": LeaseConfig()}, "upstreams": upstreams}))

    def raw(self, *, small_buffers: bool = False) -> RawClient:
        """A bare connection to it."""
        return RawClient(self.url, small_buffers=small_buffers)

    async def close(self) -> None:
        await self.http.close()
        self.listening.close()
        await self.runner.cleanup()


@dataclass(eq=False)
class Fault:
    """A proxy in front of an upstream with faults."""

    proxy: Served
    upstream: FaultyUpstream


def chat(model: str = "m", content: str = "hello", **fields: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": model, "messages": [{"role": "user", "content": content}], **fields}


def in_front_of(url: str, *, lease: Mapping[str, Any] | None = None, upstream: Mapping[str, Any] | None = None,
                group: Mapping[str, Any] | None = None, **sections: Any) -> dict[str, Any]:  # fmt: skip
    """A configuration: any model is chat (read); t, t2 are speech (write); e is an embedding model (none).

    A reader behind a waiting writer waits at once (`slice` 0), and no keep-alives are sent (`heartbeat` 60).
    """
    return {
        "leases": {"gpu0": {"heartbeat": 60, "slice": 0, **(lease or {})}},
        "upstreams": {"u": {"url": url, **(upstream or {})}},
        "groups": {
            "chat": {"mode": "read", "upstream": "u", **(group or {})},
            "speech": {"mode": "write", "models": ["t", "t2"], "upstream": "u"},
            "embeddings": {"mode": "none", "models": ["e"], "upstream": "u"},
        },
        "default_group": "chat",
        **sections,
    }


async def serve(config: Mapping[str, Any]) -> Served:
    """Start a proxy; close it at the end."""
    app = build_app(Config.model_validate(config))
    runner = web.AppRunner(app, shutdown_timeout=0.1, **server_options())
    await runner.setup()
    listening = await listen(runner, "127.0.0.1", 0)
    url = "http://{}:{}".format(*listening.sockets[0].getsockname())
    return Served(url, app[RUNTIME], runner, listening, aiohttp.ClientSession(url))
