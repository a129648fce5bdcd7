"""llama-lease in this process, in front of a FakeSwapper whose configuration it reads."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from proxy import config
from proxy.app import RUNTIME, build_app, server_options
from proxy.lease import Lease
from tests.fakes import FakeSwapper


@dataclass(frozen=True)
class Front:
    """A running llama-lease: its address and its one lease, to look at."""

    url: str
    lease: Lease

    async def waiting(self, count: int) -> None:
        """Until so many requests wait for the lease."""
        await until(lambda: len(self.lease.snapshot().waiting) == count)

    async def empty(self) -> None:
        """Until nobody holds and nobody waits."""
        await until(lambda: not self.lease.snapshot().waiting and not self.lease.snapshot().holders)


@asynccontextmanager
async def in_front_of(fake: FakeSwapper, folder: Path, speech: str = "", **lease: Any) -> AsyncIterator[Front]:
    """Serve with the settings `lease`; models named in `speech` (one letter each) are written, all others read."""
    write, read = list(speech), [name for name in fake.models if name not in speech]
    (folder / "llama-swap.yaml").write_text(yaml.safe_dump(fake.config()))
    groups: dict[str, Mapping[str, Any]] = {"chat": {"mode": "read", "models": read, "upstream": "swap"}}
    if write:
        groups["speech"] = {"mode": "write", "models": write, "upstream": "swap"}
    upstream = {"url": fake.url, "swap_config": "llama-swap.yaml"}
    settings = {"leases": {"gpu0": lease}, "upstreams": {"swap": upstream}, "groups": groups, "data_dir": "data"}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    app = build_app(config.load(path))
    runner = web.AppRunner(app, shutdown_timeout=0.2, **server_options())
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield Front(f"http://{host}:{port}", app[RUNTIME].leases["gpu0"])
    finally:
        await runner.cleanup()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that can only be looked at."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.002)
