"""What the proxy tells about itself, and the live page's own files."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse

from proxy import __version__
from proxy.page import FOLDER, TYPES
from tests.fakes import Gate, refusing_url
from tests.fronted import until
from tests.proxy.speech_server import SpeechServer, speech_server

CHAT = {"model": "qwen", "messages": [{"role": "user", "content": "hello"}]}
SPEECH = {"model": "tts", "input": "Hello.", "response_format": "pcm"}
ADMIN = {"Authorization": "Bearer admin"}
USER = {"Authorization": "Bearer user"}


@asynccontextmanager
async def one_holds_one_waits(server: SpeechServer, waiter: str = "waits") -> AsyncIterator[tuple[Gate, list[int]]]:
    """A chat, request id "holds", stands at the gate; a speech waits behind it. Gives the statuses of both at the end."""
    gate, statuses = server.swapper.hold("qwen"), [0, 0]

    async def post(place: int, id: str, path: str, fields: dict[str, Any]) -> None:
        async with server.client.post(path, json=fields, headers={"X-Request-Id": id}) as reply:
            await reply.read()
            statuses[place] = reply.status

    lease = server.runtime.leases["gpu0"]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(post(0, "holds", "/v1/chat/completions", CHAT))
        await gate.reached.wait()
        tasks.create_task(post(1, waiter, "/v1/audio/speech", SPEECH))
        await until(lambda: len(lease.snapshot().waiting) == 1)
        yield gate, statuses
        gate.open()


async def test_health_needs_no_key_and_says_nothing_more(tmp_path: Path) -> None:
    async with speech_server(tmp_path, api_keys=["right"]) as server:
        assert await server.json("GET", "/health", headers={"Authorization": ""}) == {"status": "ok"}


async def test_it_is_ready_when_every_upstream_answers(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        assert await server.json("GET", "/ready") == {
            "status": "ready",
            "upstreams": {"swapper": "reachable"},
            "backends": {"fake": "unloaded"},
        }


async def test_it_is_not_ready_while_an_upstream_is_away(tmp_path: Path) -> None:
    with refusing_url() as url:
        async with (
            speech_server(tmp_path, upstreams={"swapper": {"url": url}}) as server,
            server.client.get("/ready") as reply,
        ):
            assert reply.status == 503
            assert (await reply.json())["upstreams"] == {"swapper": "unreachable"}


async def test_an_idle_lease_has_nobody_and_its_limits(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        state = await server.json("GET", "/lease")
    lease = state["leases"]["gpu0"]
    assert (state["version"], state["stopping"]) == (__version__, False)
    assert lease["limits"] == {"max_wait": 600, "max_waiting": 1000, "max_hold": 1800}
    assert lease["holders"] == lease["waiting"] == lease["room"] == lease["rooms"] == []


async def test_the_models_of_the_configuration_are_listed_with_their_places(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        models = (await server.json("GET", "/lease"))["models"]
    assert {"id": "qwen", "group": "chat", "mode": "read", "backend": None, "lease": "gpu0"} in models
    assert {"id": "tts", "group": "speech", "mode": "write", "backend": "fake", "lease": "gpu0"} in models


async def test_the_lease_tells_who_holds_it_and_who_waits(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, one_holds_one_waits(server):
        lease = (await server.json("GET", "/lease"))["leases"]["gpu0"]
        (holder,), (waiter,) = lease["holders"], lease["waiting"]
        assert (holder["id"], holder["model"], holder["mode"], holder["opened"]) == ("holds", "qwen", "read", False)
        assert (waiter["id"], waiter["model"], waiter["mode"], waiter["position"]) == ("waits", "tts", "write", 1)
        assert waiter["number"] == holder["number"] + 1
        assert lease["room"] == ["qwen"]


async def test_a_waiting_request_can_be_cancelled(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, one_holds_one_waits(server) as (_, statuses):
        assert await server.json("DELETE", "/lease/waits") == {"id": "waits", "cancelled": True}
        await until(lambda: statuses[1] == 503)


async def test_a_running_request_can_be_cancelled_and_the_next_goes_on(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, one_holds_one_waits(server) as (_, statuses):
        await server.json("DELETE", "/lease/holds")
        await until(lambda: statuses == [503, 200])


async def test_a_request_id_may_have_slashes(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, one_holds_one_waits(server, "a/b+c=") as (_, statuses):
        await server.json("DELETE", server.url + "/lease/a%2Fb%2Bc%3D")
        await until(lambda: statuses[1] == 503)


async def test_cancelling_nobody_is_a_404(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        status, error = await server.error("DELETE", "/lease/nobody")
        assert (status, error["param"]) == (404, "id")


async def test_only_an_administrator_cancels_where_there_are_administrators(tmp_path: Path) -> None:
    async with (
        speech_server(tmp_path, api_keys=["user"], admin_keys=["admin"]) as server,
        one_holds_one_waits(server) as (_, statuses),
    ):
        assert (await server.error("DELETE", "/lease/waits", headers=USER))[0] == 403
        assert await server.json("DELETE", "/lease/waits", headers=ADMIN)
        await until(lambda: statuses[1] == 503)


async def page_file(server: SpeechServer, path: str, **headers: str) -> tuple[ClientResponse, str]:
    async with server.client.get(path, headers=headers, allow_redirects=False) as reply:
        return reply, await reply.text()


async def test_the_page_needs_no_key_and_what_it_shows_does(tmp_path: Path) -> None:
    async with speech_server(tmp_path, api_keys=["right"]) as server:
        assert (await page_file(server, "/lease/ui/", Authorization=""))[0].status == 200
        assert (await page_file(server, "/lease", Authorization=""))[0].status == 401
        assert (await page_file(server, "/lease/events", Authorization=""))[0].status == 401


async def test_the_page_lies_under_an_address_with_a_slash(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        reply, _ = await page_file(server, "/lease/ui")
        assert (reply.status, reply.headers["Location"]) == (308, "ui/")


@pytest.mark.parametrize("file", sorted(file.name for file in FOLDER.iterdir()))
async def test_every_file_has_a_type_a_strict_policy_and_a_tag(file: str, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        reply, _ = await page_file(server, f"/lease/ui/{file}")
        assert reply.status == 200
        assert reply.headers["Content-Type"] == TYPES[Path(file).suffix]
        policy = reply.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none';")
        assert "unsafe" not in policy
        again, body = await page_file(server, f"/lease/ui/{file}", **{"If-None-Match": reply.headers["ETag"]})
        assert (again.status, body) == (304, "")


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fstatus.py", "index.html%00"])
async def test_no_other_file_is_served(name: str, tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        assert (await server.error("GET", f"{server.url}/lease/ui/{name}"))[0] == 404


def test_the_page_asks_no_other_host_and_has_nothing_inline() -> None:
    for file in FOLDER.iterdir():
        text = file.read_text(encoding="utf-8")
        assert re.findall(r"(?:https?:|[\"'(])//\w[^\s\"')]*", text.replace("http://www.w3.org/2000/svg", "")) == []
        if file.suffix == ".html":
            assert re.findall(r"<style|<script(?![^>]*\bsrc=)[^>]*>|\s(?:style|on\w+)=", text) == []
