"""Load for a chat endpoint: wrk for JSON answers where it is installed, and a small client that times SSE events."""

import asyncio
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from bench._common import percentile

_STAMP = re.compile(rb"t(\d{6,});")
_WRK_SCRIPT = """
wrk.method, wrk.body = "POST", [==[%s]==]
%s
done = function(summary, latency, requests)
  local bad = summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.status
  io.write(string.format('JSON {"requests": %%d, "seconds": %%f, "p50": %%f, "p99": %%f, "errors": %%d}\\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    bad + summary.errors.timeout))
end
"""


@dataclass(frozen=True)
class JsonLoad:
    """Requests answered in so many seconds; p50 and p99 in milliseconds; answers that were not a 2xx."""

    requests: int
    seconds: float
    p50: float
    p99: float
    errors: int

    @property
    def rate(self) -> float:
        return self.requests / self.seconds


@dataclass
class SseLoad:
    """Event latencies in milliseconds, in order of arrival, and the time that all streams took together."""

    latencies: list[float] = field(default_factory=list)
    streams: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds


def body(stream: bool = False, between_us: int = 0) -> bytes:
    """A chat request; `between_us` is for bench/tiny_upstream.py."""
    fields = {"model": "m", "messages": [{"role": "user", "content": "Name ten trees."}]}
    more = {"stream": True, "seed": between_us} if stream else {}
    return json.dumps({**fields, **more}).encode()


def have_wrk() -> bool:
    """Whether wrk can be run."""
    return shutil.which("wrk") is not None


def json_load(url: str, headers: Mapping[str, str], *, connections: int, seconds: float, cpu: int | None) -> JsonLoad:
    """Keep `connections` busy for `seconds` (wrk takes whole ones) with chat requests. Blocks."""
    if have_wrk() and seconds >= 1:
        return _wrk(url, headers, connections, seconds, cpu)
    return uvloop.run(_closed_loop(url, headers, connections, seconds))


def _wrk(url: str, headers: Mapping[str, str], connections: int, seconds: float, cpu: int | None) -> JsonLoad:
    named = "\n".join(f'wrk.headers["{name}"] = "{value}"' for name, value in headers.items())
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "chat.lua"
        script.write_text(_WRK_SCRIPT % (body().decode(), named))
        command = ["wrk", "-t1", f"-c{connections}", f"-d{round(seconds)}s", "--timeout", "30s", "-s", str(script), url]
        if cpu is not None:
            command = ["taskset", "-c", str(cpu), *command]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    line = next(line for line in printed.splitlines() if line.startswith("JSON "))
    return JsonLoad(**json.loads(line.removeprefix("JSON ")))


async def _closed_loop(url: str, headers: Mapping[str, str], connections: int, seconds: float) -> JsonLoad:
    """The same load in Python, for machines without wrk: fit to show that things run, not to measure them."""
    times: list[float] = []
    errors = 0
    request = request_bytes(url, headers, body())
    end = time.monotonic() + seconds

    async def one() -> None:
        nonlocal errors
        reader, writer = await asyncio.open_connection(*address(url))
        while time.monotonic() < end:
            began = time.monotonic()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(re.search(rb"(?i)content-length: *(\d+)", head)[1])  # type: ignore[index]
            await reader.readexactly(length)
            times.append((time.monotonic() - began) * 1000)
            errors += not head.startswith(b"HTTP/1.1 2")
        writer.close()

    began = time.monotonic()
    await asyncio.gather(*(one() for _ in range(connections)))
    spent = time.monotonic() - began
    return JsonLoad(len(times), spent, percentile(times, 0.5), percentile(times, 0.99), errors)


def sse_load(
    url: str, headers: Mapping[str, str], *, streams: int, between_us: int = 0, seconds: float = 0.0
) -> SseLoad:
    """`streams` side by side, and again until `seconds` have passed (0: each once). Blocks.

    Raises RuntimeError when a stream ends before its [DONE].
    """
    return uvloop.run(_streams(url, headers, streams, between_us, seconds))


async def _streams(url: str, headers: Mapping[str, str], streams: int, between_us: int, seconds: float) -> SseLoad:
    load = SseLoad()
    request = request_bytes(url, headers, body(True, between_us))
    loop = asyncio.get_running_loop()
    began = time.monotonic()

    async def one() -> None:
        again = True
        while again:
            answer = _EventReader(load, loop.create_future())
            transport, _ = await loop.create_connection(lambda a=answer: a, *address(url))  # type: ignore[misc]
            transport.write(request)
            try:
                await asyncio.wait_for(answer.done, 120)
            finally:
                transport.close()
            again = time.monotonic() < began + seconds

    await asyncio.gather(*(one() for _ in range(streams)))
    load.seconds = time.monotonic() - began
    return load


class _EventReader(asyncio.Protocol):
    """Finds the time stamps in one answer; done at [DONE]."""

    def __init__(self, load: SseLoad, done: "asyncio.Future[None]") -> None:
        self.load = load
        self.done = done
        self.buffer = b""
        self.events = 0

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        data = self.buffer + data
        end = 0
        for match in _STAMP.finditer(data):
            self.load.latencies.append((now - int(match[1])) / 1e6)
            self.events += 1
            end = match.end()
        if b"[DONE]" in data[end:] and not self.done.done():
            self.load.streams += 1
            self.done.set_result(None)
        self.buffer = data[end:][-64:]  # a stamp may be cut anywhere

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"a stream ended after {self.events} events: {self.buffer!r}"))


def address(url: str) -> tuple[str, int]:
    """Host and port of a URL that names both."""
    parts = urlsplit(url)
    assert parts.hostname
    assert parts.port
    return parts.hostname, parts.port


def request_bytes(url: str, headers: Mapping[str, str], payload: bytes) -> bytes:
    """A whole POST, as it goes over the wire."""
    parts = urlsplit(url)
    lines = [f"POST {parts.path} HTTP/1.1", f"Host: {parts.netloc}", f"Content-Length: {len(payload)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + payload
