"""Servers that the proxy starts itself, as real processes."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.children import Child, expand
from proxy.errors import ConfigError, LeaseClosed, ModelUnavailable, UpstreamError
from tests.proxy.served import CHAT, Served, in_front_of

Serve = Callable[[Mapping[str, Any]], Awaitable[Served]]

SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print("asked for", self.path, flush=True)
        if self.path == "/die":
            sys.stderr.write("about to die\\nlast words")
            sys.stderr.flush()
            os._exit(3)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")
    do_POST = do_GET
    def log_message(self, *args): pass
print("started", os.getpid(), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def url() -> str:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{holder.getsockname()[1]}"


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def command(url: str, program: str = SERVER) -> list[str]:
    return [sys.executable, "-c", program, url.rpartition(":")[2]]


class Log(logging.Handler):
    """Lets a test wait for a line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._news = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.name}: {record.getMessage()}")
        self._news.set()

    async def until(self, part: str, times: int = 1) -> str:
        while len(found := [line for line in self.lines if part in line]) < times:
            self._news.clear()
            await self._news.wait()
        return found[times - 1]


@pytest.fixture
async def log() -> AsyncIterator[Log]:
    handler, root = Log(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


async def gone(pid: int) -> None:
    """Returns when there is no such process."""
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.005)


async def pid_of(log: Log, times: int = 1) -> int:
    return int((await log.until("started, process", times)).split("process ")[1].split(":")[0])


# The command


def test_a_commands_placeholders_are_replaced() -> None:
    words = expand(
        "${python} -m server --host=${host} --port ${port} 'two words' ${package:aiohttp}/x", "http://[::1]:81"
    )
    assert words == [
        sys.executable, "-m", "server", "--host=::1", "--port", "81", "two words", str(Path(aiohttp.__file__).parent / "x")
    ]  # fmt: skip
    assert expand(("a b", "${port}"), "http://h") == ["a b", "80"]


@pytest.mark.parametrize(
    "text",
    [
        "${pyhton}",
        "${package:no_such_package}",
        "${package:}",
        "${package:aiohttp.nothing}",
        "${package:no.such}",
        "${}",
    ],
)
def test_a_placeholder_that_means_nothing_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="command: "):
        expand(text, "http://h:1")


# One server


async def test_a_server_is_started_healthy_once_it_answers_and_heard_in_the_log(
    http: aiohttp.ClientSession, url: str, log: Log
) -> None:
    child = Child("chat", command(url), url, "/health", http)
    assert not child.healthy
    child.start()
    await child.ready(30)
    assert child.healthy
    await log.until("server.chat: asked for /health")
    await child.stop()
    await gone(await pid_of(log))


async def test_a_server_that_ends_is_started_again_and_its_last_words_are_in_the_log(
    http: aiohttp.ClientSession, url: str, log: Log
) -> None:
    child = Child("chat", command(url), url, "/health", http)
    child.start()
    await child.ready(30)
    with pytest.raises(aiohttp.ClientError):
        await http.get(f"{url}/die")
    await log.until("server chat: ended with exit status 3")
    assert not child.healthy
    await log.until("server.chat: about to die")
    await log.until("server.chat: last words")
    await log.until("next start in 1 s")
    await child.ready(30)
    first, second = await pid_of(log), await pid_of(log, 2)
    assert first != second
    await child.stop()
    await gone(second)


async def test_everything_that_a_short_lived_server_says_is_in_the_log(
    http: aiohttp.ClientSession, url: str, log: Log
) -> None:
    child = Child("chat", [sys.executable, "-c", "print('x' * 200000); print('no model file')"], url, "/", http)
    child.start()
    await log.until("ended with exit status 0")
    await log.until("server.chat: no model file")
    await child.stop()


async def test_who_waits_for_a_server_that_does_not_come_up_is_told_what_is_known(
    http: aiohttp.ClientSession, url: str, log: Log
) -> None:
    child = Child("chat", [sys.executable, "-c", "raise SystemExit(7)"], url, "/", http)
    with pytest.raises(UpstreamError, match="has not started yet"):
        await child.ready(0)
    child.start()
    await log.until("ended with exit status 7")
    with pytest.raises(UpstreamError, match="'chat' is not up: it ended with exit status 7"):
        await child.ready(0.01)
    await child.stop()


async def test_a_command_that_does_not_exist_is_told_and_tried_again(
    http: aiohttp.ClientSession, url: str, log: Log, tmp_path: Path
) -> None:
    child = Child("chat", [str(tmp_path / "server")], url, "/", http)
    child.start()
    await log.until("cannot be started")
    with pytest.raises(UpstreamError, match="cannot be started"):
        await child.ready(0.01)
    (tmp_path / "server").write_text("#!/bin/sh\nexit 5\n")
    (tmp_path / "server").chmod(0o755)
    await log.until("ended with exit status 5")
    await child.stop()


async def test_each_start_that_fails_makes_the_next_pause_longer(
    http: aiohttp.ClientSession, url: str, log: Log
) -> None:
    child = Child("chat", [sys.executable, "-c", ""], url, "/", http)
    child.start()
    await log.until("next start in 1 s")
    await log.until("next start in 2 s")
    await child.stop()


async def test_a_server_ends_with_all_that_it_has_started(http: aiohttp.ClientSession, url: str, log: Log) -> None:
    program = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    child = Child("chat", command(url, program + "print('grandchild', p.pid, flush=True)\n" + SERVER), url, "/", http)
    child.start()
    await child.ready(30)
    grandchild = int((await log.until("grandchild ")).rpartition(" ")[2])
    await child.stop()
    await gone(grandchild)


async def test_a_server_whose_first_process_ends_is_started_again_though_others_live_on(
    http: aiohttp.ClientSession, url: str, log: Log
) -> None:
    program = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print('grandchild', p.pid, flush=True)"
    )
    child = Child("chat", [sys.executable, "-c", program], url, "/", http)
    child.start()
    grandchild = int((await log.until("grandchild ")).rpartition(" ")[2])
    await log.until("ended with exit status 0")
    await gone(grandchild)
    await log.until("started, process", 2)
    await child.stop()


async def test_stopping_a_server_that_waits_for_its_next_start_is_quick(
    http: aiohttp.ClientSession, url: str, log: Log
) -> None:
    child = Child("chat", [sys.executable, "-c", ""], url, "/", http)
    child.start()
    await log.until("next start in")
    await child.stop()
    await child.stop()


async def test_a_server_that_was_stopped_before_its_start_is_not_started(
    http: aiohttp.ClientSession, url: str, log: Log
) -> None:
    first, second = (Child(name, command(url), url, "/health", http) for name in ("replaced", "chat"))
    await first.stop()
    first.start()
    second.start()
    assert await second.ready(30)
    assert not await first.ready(30)
    assert not [line for line in log.lines if "server replaced" in line]
    await second.stop()


# Behind the proxy


async def test_a_request_waits_without_the_lease_until_its_server_is_up(
    serve_proxy: Serve, url: str, log: Log, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    proxy = await serve_proxy(in_front_of(url, upstream={"command": gated(url, gate)}))
    pid = await pid_of(log)
    asking = asyncio.create_task(proxy.chat("t"))
    assert (await proxy.ask("GET", "/ready")).status == 503
    lease = await proxy.lease()
    assert (lease["holders"], lease["waiting"]) == ([], [])
    gate.touch()
    assert (await asking).body == b"ok"
    assert (await proxy.ask("GET", "/ready")).status == 200
    await proxy.close()
    await gone(pid)


def gated(url: str, gate: Path) -> list[str]:
    """A server that is not up before there is a file `gate`."""
    return command(url, f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n" + SERVER)


async def test_a_request_that_waits_for_a_server_follows_its_replacement(
    serve_proxy: Serve, url: str, log: Log, tmp_path: Path
) -> None:
    proxy = await serve_proxy(in_front_of(url, upstream={"command": gated(url, tmp_path / "never")}))
    pid = await pid_of(log)
    waiting = asyncio.create_task(proxy.runtime.before_lease(proxy.runtime.plan("POST", CHAT, "t")))
    await asyncio.sleep(0)
    for gate in ("never either", "gate"):
        changed = in_front_of(url, upstream={"command": gated(url, tmp_path / gate)})
        proxy.runtime.apply(proxy.runtime.config.model_validate(changed))
    await gone(pid)
    assert not waiting.done()
    (tmp_path / "gate").touch()
    await waiting
    assert (await proxy.chat("t")).body == b"ok"
    assert len([line for line in log.lines if "started, process" in line]) == 2


@pytest.mark.parametrize(
    ("name", "change"), [("other", "taken out of the configuration"), ("u", "moved to http://127.0.0.1:9")]
)
async def test_a_request_that_waits_for_a_server_that_a_reload_takes_away_is_told_at_once(
    serve_proxy: Serve, url: str, log: Log, tmp_path: Path, name: str, change: str
) -> None:
    proxy = await serve_proxy(in_front_of(url, upstream={"command": gated(url, tmp_path / "never")}))
    await pid_of(log)
    waiting = asyncio.create_task(proxy.runtime.before_lease(proxy.runtime.plan("POST", CHAT, "t")))
    await asyncio.sleep(0)
    changed = {
        "upstreams": {name: {"url": "http://127.0.0.1:9"}},
        "groups": {"chat": {"mode": "read", "upstream": name}},
    }
    proxy.runtime.apply(proxy.runtime.config.model_validate(changed))
    with pytest.raises(ModelUnavailable, match=f"the server 'u' was {change} while"):
        await waiting


async def test_a_request_that_waits_for_a_server_when_the_proxy_stops_is_told_at_once(
    serve_proxy: Serve, url: str, log: Log, tmp_path: Path
) -> None:
    proxy = await serve_proxy(in_front_of(url, upstream={"command": gated(url, tmp_path / "never")}))
    await pid_of(log)
    waiting = asyncio.create_task(proxy.runtime.before_lease(proxy.runtime.plan("POST", CHAT, "t")))
    await asyncio.sleep(0)
    await proxy.close()
    with pytest.raises(LeaseClosed):
        await waiting


async def test_a_server_that_does_not_come_up_is_502_after_load_timeout(serve_proxy: Serve, url: str) -> None:
    upstream = {"command": [sys.executable, "-c", "raise SystemExit(7)"], "load_timeout": 0.3}
    proxy = await serve_proxy(in_front_of(url, upstream=upstream))
    reply = await proxy.chat()
    assert reply.status == 502
    assert "is not up" in reply.error["message"]


async def test_a_server_whose_command_changes_in_a_reload_is_replaced(serve_proxy: Serve, url: str, log: Log) -> None:
    settings = in_front_of(url, upstream={"command": command(url)})
    proxy = await serve_proxy(settings)
    assert (await proxy.chat()).status == 200
    first = await pid_of(log)
    changed = in_front_of(url, upstream={"command": command(url, SERVER + "\n# changed")})
    proxy.runtime.apply(proxy.runtime.config.model_validate(changed))
    await gone(first)
    await pid_of(log, 2)
    assert (await proxy.chat()).status == 200


async def test_a_command_that_means_nothing_stops_the_start(serve_proxy: Serve, url: str) -> None:
    with pytest.raises(ConfigError, match=r"upstreams\.u\.command: the Python package 'no_such' is not installed"):
        await serve_proxy(in_front_of(url, upstream={"command": "${package:no_such}"}))
