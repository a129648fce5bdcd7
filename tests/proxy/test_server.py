"""The server around the forwarding: the queue's limits, administrators, models, health, reload and shutdown."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy import config, serve
from proxy.runtime import Runtime
from tests.fakes import FakeSwapper, FaultyUpstream, faults, refusing_url
from tests.fakes.answers import SSE
from tests.proxy.conftest import StartFault
from tests.proxy.served import CHAT, Served, chat, in_front_of

Serve = Callable[[Mapping[str, Any]], Awaitable[Served]]


# The queue's own limits


async def test_a_full_queue_is_429_at_once_with_an_honest_retry_after(fault: StartFault) -> None:
    f = await fault(faults.stalls_after(1), lease={"max_waiting": 1})
    async with f.proxy.raw() as holder, f.proxy.raw() as waiter:
        await holder.post(CHAT, chat("t", stream=True))
        await f.upstream.until(1)
        await waiter.post(CHAT, chat())
        await f.proxy.until(waiting=1)
        reply = await f.proxy.chat()
        assert (reply.status, reply.error["code"], reply.error["type"]) == (429, "queue_full", "rate_limit_error")
        assert 1 <= int(reply.headers["Retry-After"]) <= 60
        said = json.loads((await f.proxy.chat(path="/v1/messages")).body)
        assert said["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(("limit", "header"), [(0.05, None), (60, "0.05"), (60, "0"), (0.05, "60")])
async def test_a_wait_that_is_too_long_is_503_and_not_to_be_retried(
    fault: StartFault, limit: float, header: str | None
) -> None:
    f = await fault(faults.stalls_after(1), lease={"max_wait": limit})
    async with f.proxy.raw() as holder:
        await holder.post(CHAT, chat("t", stream=True))
        await f.upstream.until(1)
        reply = await f.proxy.chat(headers={"X-Max-Wait": header} if header else {})
        assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (503, "wait_too_long", "false")
        assert len((await f.proxy.lease())["holders"]) == 1


async def test_an_x_max_wait_of_nothing_is_served_where_nobody_is_in_the_way(fault: StartFault) -> None:
    f = await fault(faults.ok)
    assert (await f.proxy.chat(headers={"X-Max-Wait": "0"})).status == 200


# Administrators


async def test_a_waiting_request_can_be_taken_out(fault: StartFault) -> None:
    f = await fault(faults.stalls_after(1))
    async with f.proxy.raw() as holder:
        await holder.post(CHAT, chat("t", stream=True))
        await f.upstream.until(1)
        waiting = asyncio.create_task(f.proxy.chat(headers={"X-Request-Id": "stuck"}))
        [waiter] = (await f.proxy.until(waiting=1))["waiting"]
        assert (waiter["id"], waiter["position"], waiter["mode"]) == ("stuck", 1, "read")
        assert (await f.proxy.ask("DELETE", "/lease/stuck")).status == 200
        reply = await waiting
        assert (reply.status, reply.error["code"]) == (503, "cancelled")
    assert len(f.upstream.exchanges) == 1


async def test_a_running_request_can_be_cut_off(fault: StartFault) -> None:
    f = await fault(faults.never_answers, faults.stalls_after(1))
    asking = asyncio.create_task(f.proxy.chat("t", headers={"X-Request-Id": "long"}))
    exchange = await f.upstream.until(1)
    assert (await f.proxy.ask("DELETE", "/lease/long")).status == 200
    reply = await asking
    assert (reply.status, reply.error["code"]) == (503, "cancelled")
    await exchange.gone.wait()
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat("t", stream=True), X_Request_Id="stream")
        _, headers = await client.read_head()
        await client.read_until(faults.CHAT.pieces[0])
        assert headers["content-type"] == SSE
        assert (await f.proxy.ask("DELETE", "/lease/stream/")).status == 200
        assert b'"code": "cancelled"' in await client.read_rest()
    await (await f.upstream.until(2)).gone.wait()


async def test_only_administrators_take_requests_out(fault: StartFault) -> None:
    f = await fault(faults.ok, api_keys=["user"], admin_keys=["root"])
    f.proxy.http.headers["Authorization"] = "Bearer root"
    user = {"Authorization": "Bearer user"}
    assert (await f.proxy.ask("DELETE", "/lease/x", headers=user)).status == 403
    reply = await f.proxy.ask("DELETE", "/lease/x")
    assert (reply.status, reply.error["param"]) == (404, "id")


# Models and health


async def test_models_of_all_upstreams_backends_and_aliases_are_one_list(serve_proxy: Serve) -> None:
    async with FakeSwapper(["q", "org/v"]) as one, FakeSwapper(["q", "w"]) as two:
        settings = in_front_of(one.url, aliases={"gpt-4o": "org/v", "none": "unheard-of"})
        settings["upstreams"]["two"] = {"url": two.url}
        settings["backends"] = {"voice": {"kind": "hibari"}}
        settings["groups"]["local"] = {"mode": "write", "models": ["hibari"], "backend": "voice"}
        proxy = await serve_proxy(settings)
        listed = json.loads((await proxy.ask("GET", "/v1//models/")).body)
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["q", "org/v", "w", "hibari", "gpt-4o"]
        assert listed["data"][0]["meta"]["llamaswap"]["type"] == "model"
        assert all(model["object"] == "model" for model in listed["data"])
        assert json.loads((await proxy.ask("GET", "/models")).body) == listed
        assert json.loads((await proxy.ask("GET", "/v1/models/org/v")).body)["id"] == "org/v"
        assert (await proxy.ask("GET", "/v1/models/x")).error["code"] == "model_not_found"
        assert (one.loads, two.loads) == ([], [])


@pytest.mark.parametrize(
    "behaviour",
    [faults.refuses(500), faults.dies_before_headers, faults.dies_in_mid_body]
    + [
        lambda exchange, body=body: exchange.whole(200, body)
        for body in (b"", b"{", b"[]", b'{"data": null}', b'{"data": 5}')
    ],
)
async def test_an_upstream_that_is_down_leaves_its_models_out_and_is_named(serve_proxy: Serve, behaviour: Any) -> None:
    async with FakeSwapper(["q"]) as up, FaultyUpstream(behaviour) as down:
        settings = in_front_of(up.url)
        settings["upstreams"]["broken"] = {"url": down.url}
        proxy = await serve_proxy(settings)
        reply = await proxy.ask("GET", "/v1/models")
        assert (reply.status, reply.headers["X-Unavailable-Upstreams"]) == (200, "broken")
        assert [model["id"] for model in json.loads(reply.body)["data"]] == ["q"]


async def test_ready_tells_which_upstream_answers(serve_proxy: Serve) -> None:
    async with FakeSwapper(["q"]) as up:
        settings = in_front_of(up.url)
        proxy = await serve_proxy(settings)
        assert (await proxy.ask("GET", "/ready")).status == 200
        with refusing_url() as url:
            settings["upstreams"]["broken"] = {"url": url}
            proxy = await serve_proxy(settings)
            reply = await proxy.ask("GET", "/ready")
        assert reply.status == 503
        assert json.loads(reply.body)["upstreams"] == {"u": "reachable", "broken": "unreachable"}
        assert json.loads((await proxy.ask("GET", "/health")).body) == {"status": "ok"}


async def test_the_lease_page_tells_who_holds_and_who_waits(fault: StartFault) -> None:
    f = await fault(faults.stalls_after(1))
    async with f.proxy.raw() as holder:
        await holder.post(CHAT, chat("t", stream=True), X_Request_Id="first")
        await holder.read_until(faults.CHAT.pieces[0])
        waiting = [asyncio.create_task(f.proxy.chat(model)) for model in ("m", "n")]
        lease = await f.proxy.until(waiting=2)
        [held] = lease["holders"]
        assert (held["id"], held["model"], held["group"], held["mode"], held["opened"]) == (
            "first", "t", "speech", "write", True
        )  # fmt: skip
        assert [(w["model"], w["position"], w["mode"]) for w in lease["waiting"]] == [
            ("m", 1, "read"),
            ("n", 2, "read"),
        ]
        assert lease["room"] == ["t"]
    await asyncio.gather(*waiting)


# Reload


class Reloadable:
    """A proxy whose configuration is a file."""

    def __init__(self, path: Path, serve_proxy: Serve) -> None:
        self.path = path
        self._serve = serve_proxy

    async def start(self, settings: Mapping[str, Any]) -> Served:
        self.path.write_text(yaml.safe_dump(dict(settings)))
        self.proxy = await self._serve({**settings, "path": self.path})
        return self.proxy

    def change(self, settings: Mapping[str, Any] | str) -> bool:
        self.path.write_text(settings if isinstance(settings, str) else yaml.safe_dump(dict(settings)))
        return serve.reload_config(self.proxy.runtime)


@pytest.fixture
def file(tmp_path: Path, serve_proxy: Serve) -> Reloadable:
    return Reloadable(tmp_path / "config.yaml", serve_proxy)


async def test_running_and_waiting_requests_keep_their_places_over_a_reload(file: Reloadable) -> None:
    async with FaultyUpstream(faults.stalls_after(1), faults.ok) as old, FaultyUpstream(faults.ok) as new:
        proxy = await file.start(in_front_of(old.url))
        async with proxy.raw() as holder:
            await holder.post(CHAT, chat("t", stream=True), X_Request_Id="holds")
            await holder.read_until(faults.CHAT.pieces[0])
            waiting = asyncio.create_task(proxy.chat(headers={"X-Request-Id": "waits"}))
            await proxy.until(waiting=1)
            assert file.change(in_front_of(new.url, lease={"order": "fifo", "max_wait": 7}))
            lease = await proxy.lease()
            assert [holder["id"] for holder in lease["holders"]] == ["holds"]
            assert [waiter["id"] for waiter in lease["waiting"]] == ["waits"]
            assert not old.exchanges[0].gone.is_set()
        assert (await waiting).status == 200
        assert (await proxy.chat()).status == 200
        assert (len(old.exchanges), len(new.exchanges)) == (2, 1)
        await proxy.idle()


@pytest.mark.parametrize(
    "text", ["lissten: x\n", "a: [\n", "", "backends: {b: {kind: unheard-of}}\n", "? [a]\n", "[" * 300]
)
async def test_a_bad_file_is_refused_and_the_old_one_stays(
    file: Reloadable, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeSwapper(["q"]) as swapper:
        proxy = await file.start(in_front_of(swapper.url))
        assert not file.change(text)
        assert "the old one stays" in caplog.text
        assert (await proxy.chat("q")).status == 200
        page = (await proxy.ask("GET", "/metrics")).body.decode()
        assert 'llama_lease_config_reloads_total{result="failure"} 1.0' in page
        assert file.change(in_front_of(swapper.url, aliases={"gpt-4o": "q"}))
        assert (await proxy.chat("gpt-4o")).status == 200
        await proxy.idle()


class Clumsy(Runtime):
    def apply(self, config: config.Config) -> None:
        raise RuntimeError("clumsy")


async def test_a_fault_of_our_own_in_a_reload_is_told_and_does_not_end_reloading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.yaml").write_text("{}\n")
    runtime = Clumsy(config.load(tmp_path / "config.yaml"))
    assert not serve.reload_config(runtime)
    assert "clumsy" in caplog.text


async def test_a_file_that_has_gone_is_refused(file: Reloadable) -> None:
    async with FakeSwapper(["q"]) as swapper:
        proxy = await file.start(in_front_of(swapper.url))
        file.path.unlink()
        assert not serve.reload_config(proxy.runtime)
        assert (await proxy.chat("q")).status == 200


async def test_a_reload_changes_keys_hosts_limits_and_groups(file: Reloadable) -> None:
    async with FakeSwapper(["q"]) as swapper:
        proxy = await file.start(in_front_of(swapper.url))
        settings = in_front_of(swapper.url, api_keys=["good"], max_body=1000, allowed_hosts=["loopback", "gpu.home"])
        settings["groups"]["embeddings"]["models"] = ["q"]
        assert file.change(settings)
        assert (await proxy.chat("q")).status == 401
        good = {"Authorization": "Bearer good", "Host": "gpu.home"}
        assert "Server-Timing" in (await proxy.chat("q", headers=good)).headers
        assert (await proxy.chat("q", headers=good, filler="x" * 1000)).status == 413


async def test_a_shorter_queue_and_another_max_wait_hold_for_those_who_come(file: Reloadable) -> None:
    async with FaultyUpstream(faults.stalls_after(1), faults.ok) as upstream:
        proxy = await file.start(in_front_of(upstream.url))
        async with proxy.raw() as holder:
            await holder.post(CHAT, chat("t", stream=True))
            await holder.read_until(faults.CHAT.pieces[0])
            waiting = asyncio.create_task(proxy.chat())
            await proxy.until(waiting=1)
            assert file.change(in_front_of(upstream.url, lease={"max_waiting": 1}))
            assert (await proxy.chat()).status == 429
            assert not waiting.done()
        assert (await waiting).status == 200
        await proxy.idle()


async def test_an_upstream_that_is_taken_away_in_a_reload_still_answers_who_runs_there(file: Reloadable) -> None:
    async with FaultyUpstream(faults.ok) as stays, FakeSwapper(["v"]) as goes:
        settings = in_front_of(stays.url)
        both = {**settings, "upstreams": {**settings["upstreams"], "two": {"url": goes.url}}}
        both["groups"] = {**settings["groups"], "vision": {"mode": "read", "models": ["v"], "upstream": "two"}}
        proxy = await file.start(both)
        gate = goes.hold("v")
        running = asyncio.create_task(proxy.chat("v"))
        await gate.reached.wait()
        assert file.change(settings)
        gate.open()
        assert (await running).status == 200
        assert (await proxy.chat("v")).body == faults.TEXT.body
        await proxy.idle()


async def test_a_reload_of_the_same_file_changes_nothing(file: Reloadable) -> None:
    async with FakeSwapper(["q"]) as swapper:
        settings = in_front_of(swapper.url)
        proxy = await file.start(settings)
        before = proxy.runtime.upstreams["u"]
        assert file.change(settings)
        assert proxy.runtime.upstreams["u"] is before
        assert proxy.runtime.config == config.load(file.path)


# Shutdown


async def test_a_draining_server_refuses_new_and_waiting_requests_and_lets_the_running_finish(
    serve_proxy: Serve,
) -> None:
    async with FakeSwapper(["q", "t"]) as swapper:
        proxy = await serve_proxy(in_front_of(swapper.url))
        gate = swapper.hold("t", after=5)
        running = asyncio.create_task(proxy.chat("t", stream=True))
        await gate.reached.wait()
        waiting = asyncio.create_task(proxy.chat("q"))
        await proxy.until(waiting=1)
        draining = asyncio.create_task(proxy.runtime.drain())
        refused = await waiting
        assert (refused.status, refused.error["code"], refused.headers["x-should-retry"]) == (
            503,
            "shutting_down",
            "false",
        )
        assert (await proxy.chat("q")).error["code"] == "shutting_down"
        assert (await proxy.ask("GET", "/ready")).status == 503
        assert (await proxy.ask("GET", "/health")).status == 200
        assert not draining.done()
        gate.open()
        assert b"[DONE]" in (await running).body
        await draining
        await proxy.idle()


async def test_a_stream_that_waits_while_the_server_drains_gets_the_reason_as_an_event(serve_proxy: Serve) -> None:
    async with FakeSwapper(["q", "t"]) as swapper:
        soon = {"heartbeat": 0.01, "heartbeat_interval": 0.01}
        proxy = await serve_proxy(in_front_of(swapper.url, lease=soon))
        gate = swapper.hold("t")
        running = asyncio.create_task(proxy.chat("t"))
        await gate.reached.wait()
        async with proxy.raw() as client:
            await client.post(CHAT, chat("q", stream=True))
            await client.read_until(b"waiting")
            draining = asyncio.create_task(proxy.runtime.drain())
            assert b"shutting_down" in await client.read_rest()
        gate.open()
        await asyncio.gather(running, draining)


async def test_a_slow_client_can_read_all_of_its_answer_before_the_server_ends(serve_proxy: Serve) -> None:
    size = 8 << 20
    async with FaultyUpstream(faults.huge(size)) as upstream:
        proxy = await serve_proxy(in_front_of(upstream.url, drain_timeout=3600))
        async with proxy.raw(small_buffers=True) as slow:
            await slow.post(CHAT, chat("t"))
            await slow.read_head()
            await proxy.idle()
            draining = asyncio.create_task(proxy.runtime.drain())
            await asyncio.wait({draining}, timeout=0.3)
            assert not draining.done()  # some of it lies in the spool
            body = b""
            while not draining.done():
                body += await slow.read(1 << 16)
            ending = asyncio.create_task(serve.finish(proxy.runtime, proxy.runner))
            await asyncio.wait({ending}, timeout=0.3)
            assert not ending.done()  # the rest is in the connection's buffer
            body += await slow.read(size - len(body))
            await ending
            assert body == bytes(range(256)) * (size // 256)


async def test_a_client_that_does_not_read_holds_up_the_end_for_drain_timeout_and_no_longer(
    serve_proxy: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with FaultyUpstream(faults.huge(20 << 20)) as upstream:
        proxy = await serve_proxy(in_front_of(upstream.url, drain_timeout=0.2))
        async with proxy.raw(small_buffers=True) as slow:
            await slow.post(CHAT, chat("t"))
            await slow.read_head()
            await proxy.idle()
            await serve.finish(proxy.runtime, proxy.runner)
            assert "had not read their answers after drain_timeout" in caplog.text


async def test_nobody_waits_for_idle_connections_readers_of_the_feed_and_slow_uploaders(serve_proxy: Serve) -> None:
    async with FaultyUpstream(faults.ok) as upstream:
        proxy = await serve_proxy(in_front_of(upstream.url, drain_timeout=3600))
        assert (await proxy.chat()).status == 200
        async with proxy.raw() as idle, proxy.raw() as reader, proxy.raw() as uploader:
            await idle.head("GET", "/health")
            await idle.read_body((await idle.read_head())[1])
            await reader.head("GET", "/lease/events")
            await reader.read_until(b"retry: 1000")
            await uploader.head("POST", CHAT, 1000)
            await uploader.send(b"{")
            await serve.finish(proxy.runtime, proxy.runner)
            await proxy.close()
            assert (await reader.read_rest()).endswith(b"0\r\n\r\n")


async def test_what_still_runs_after_drain_timeout_is_cut_off(
    serve_proxy: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with FaultyUpstream(faults.stalls_after(1)) as upstream:
        proxy = await serve_proxy(in_front_of(upstream.url, drain_timeout=0.05))
        async with proxy.raw() as client:
            await client.post(CHAT, chat("t", stream=True))
            await client.read_until(faults.CHAT.pieces[0])
            await proxy.runtime.drain()
            assert "still running after drain_timeout" in caplog.text
            await proxy.close()
            assert not (await client.read_rest()).endswith(b"0\r\n\r\n")
        await upstream.exchanges[0].gone.wait()
