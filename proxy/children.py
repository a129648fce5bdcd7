"""Model servers that the proxy starts itself (`upstreams.NAME.command`), watches, restarts, and takes down with it."""

import asyncio
import contextlib
import ctypes
import importlib.util
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from yarl import URL

from proxy.errors import ConfigError, UpstreamError

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_STABLE = 60.0
_STOP_PATIENCE = 10.0
_POLL = 0.2
_LAST_WORDS = 1.0


def expand(command: str | Sequence[str], url: str) -> list[str]:
    """The words of a command, its placeholders replaced.

    `${python}` is this interpreter, `${host}` and `${port}` come from `url`, `${package:NAME}` is the folder of an
    installed Python package. Raises ConfigError for an unknown placeholder or a package that is not installed.
    """
    address = URL(url)

    def value(match: re.Match[str]) -> str:
        name, _, argument = match[1].partition(":")
        match name:
            case "python":
                return sys.executable
            case "host":
                return address.host or ""
            case "port":
                return str(address.port)
            case "package":
                with contextlib.suppress(ImportError, ValueError):
                    spec = importlib.util.find_spec(argument)
                    if spec is not None and spec.origin is not None:
                        return str(Path(spec.origin).parent)
                raise ConfigError(f"command: the Python package '{argument}' is not installed")
        raise ConfigError(f"command: unknown placeholder '${{{match[1]}}}'; there are python, host, port, package:NAME")

    words = shlex.split(command) if isinstance(command, str) else list(command)
    return [re.sub(r"\$\{([^}]*)\}", value, word) for word in words]


class Child:
    """One server process: started by `start`, healthy from the moment that its health path answers below 500."""

    def __init__(self, name: str, command: Sequence[str], url: str, health: str, client: aiohttp.ClientSession) -> None:
        self.name = name
        self.command = list(command)
        self._probe = url + health
        self._client = client
        self._healthy = asyncio.Event()
        self._stopped = False
        self._task: asyncio.Task[None] | None = None
        self._last_exit = "it has not started yet"

    @property
    def healthy(self) -> bool:
        """It has answered its health path since its last start."""
        return self._healthy.is_set() and not self._stopped

    def start(self) -> None:
        """Run it from now on, again after each exit, until `stop`; nothing after that."""
        if self._stopped:
            return
        self._task = asyncio.create_task(self._run(), name=f"child {self.name}")

    async def ready(self, timeout: float) -> bool:
        """Wait until it is healthy, and say so; False at once when it is stopped, another may have taken its place.

        Raises UpstreamError after `timeout` seconds, with what is known.
        """
        if not (self.healthy or self._stopped):
            try:
                async with asyncio.timeout(timeout):
                    await self._healthy.wait()
            except TimeoutError:
                raise UpstreamError(f"the server '{self.name}' is not up: {self._last_exit}") from None
        return not self._stopped

    async def stop(self) -> None:
        """End it: SIGTERM to its process group, SIGKILL after a while. Returns when it has gone."""
        self._stopped = True
        self._healthy.set()  # who waits for it need not wait any longer
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause = _FIRST_PAUSE
        while True:
            started = loop.time()
            try:
                await self._once()
            except OSError as error:
                self._last_exit = f"it cannot be started: {error}"
                logger.error("server %s: %s", self.name, self._last_exit)
            if loop.time() - started > _STABLE:
                pause = _FIRST_PAUSE
            logger.warning("server %s: next start in %.0f s", self.name, pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _once(self) -> None:
        """From its start to its exit."""
        # A pipe of our own: with asyncio's, `wait` would also wait for whoever has inherited it.
        output, said = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(said)
        logger.info("server %s: started, process %d: %s", self.name, process.pid, shlex.join(self.command))
        self._last_exit = "it is starting"
        listening, watching = asyncio.create_task(self._log(output)), asyncio.create_task(self._watch_health())
        try:
            code = await process.wait()
            self._last_exit = f"it ended with exit status {code}"
        finally:
            watching.cancel()
            self._healthy.clear()
            await _end(process)
            await asyncio.wait({listening}, timeout=_LAST_WORDS)  # they tell why it ended
            listening.cancel()
            await asyncio.gather(listening, watching, return_exceptions=True)
        logger.error("server %s: ended with exit status %d", self.name, code)

    async def _log(self, output: int) -> None:
        """Everything that comes out of the pipe `output`, line by line, to its end; closes it."""
        server = logging.getLogger(f"server.{self.name}")
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(output, "rb", buffering=0)
        )
        pending = b""
        ended = False
        try:
            while not ended:
                data = await stream.read(1 << 16)
                ended = not data
                *lines, pending = (pending + (data or b"\n")).split(b"\n")
                pending = pending[-(1 << 16) :]
                for line in lines:
                    if text := line.decode("utf-8", "replace").rstrip():
                        server.info("%s", text)
        finally:
            transport.close()

    async def _watch_health(self) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with self._client.get(self._probe, timeout=aiohttp.ClientTimeout(total=5)) as answer:
                    if answer.status < 500:
                        logger.info("server %s: healthy", self.name)
                        self._healthy.set()
                        return
            await asyncio.sleep(_POLL)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Take down the process and the group that it leads; a second cancellation does not stop this."""
    for sign, patience in ((signal.SIGTERM, _STOP_PATIENCE), (signal.SIGKILL, _STOP_PATIENCE)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        waiting = asyncio.ensure_future(process.wait())
        done, _ = await asyncio.wait({waiting}, timeout=patience)
        if done:
            return
        waiting.cancel()


def _die_with_parent() -> None:
    """In the child, before exec: Linux ends it should the proxy be killed outright. PR_SET_PDEATHSIG is 1."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
