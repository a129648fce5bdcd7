"""The embedded default as a user runs it: `llama-lease serve` with the shipped config.yaml, on free ports."""

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def write_config(folder: Path, changes: Mapping[str, str] | None = None) -> tuple[Path, int]:
    """config.yaml with other ports, and `changes` (pattern -> replacement) made in its text. Returns path and port."""
    listen, chat, embeddings = free_ports(3)
    text = (ROOT / "config.yaml").read_text()
    for old, new in ((9292, listen), (9293, chat), (9294, embeddings)):
        text = text.replace(str(old), str(new))
    for pattern, replacement in (changes or {}).items():
        text, count = re.subn(pattern, replacement, text)
        assert count, f"config.yaml has nothing like {pattern}"
    path = folder / "config.yaml"
    path.write_text(text)
    return path, listen


class Server:
    """A `llama-lease serve` process: `await start()`, which returns once its welcome is printed, then `await stop()`."""

    def __init__(self, path: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.path = path
        self.welcome = ""
        self.log = path.with_suffix(".log")

    async def start(self) -> None:
        self.welcome = ""
        with self.log.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "proxy", "serve", "--config", str(self.path),
                cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        assert self.process.stdout is not None
        while "/lease/ui" not in self.welcome:
            line = await self.process.stdout.readline()
            assert line, f"the server ended before it was up:\n{self.log.read_text()[-3000:]}"
            self.welcome += line.decode()

    async def stop(self, sign: signal.Signals = signal.SIGTERM) -> int:
        """Signal it, wait, and return its exit status."""
        with suppress(ProcessLookupError):
            self.process.send_signal(sign)
        await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode


async def until(condition: Callable[[], object]) -> None:
    """Wait for something in another process, which can only be asked."""
    while not await asyncio.to_thread(condition):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
