"""Websockets through the proxy: both ways, message by message, under the lease for as long as they are open."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import WSMsgType, web

from tests.fakes import FakeSwapper, faults, refusing_url
from tests.proxy.conftest import StartFault
from tests.proxy.served import Served, chat, in_front_of

Serve = Callable[[Mapping[str, Any]], Awaitable[Served]]
Handler = Callable[[web.WebSocketResponse], Awaitable[None]]


@asynccontextmanager
async def upstream(handler: Handler, requests: list[web.Request] | None = None) -> AsyncIterator[str]:
    """A server that hands each websocket to `handler`; gives its URL."""

    async def accept(request: web.Request) -> web.StreamResponse:
        if requests is not None:
            requests.append(request)
        socket = web.WebSocketResponse(protocols=["chat.v2"], autoping=False, max_msg_size=0)
        await socket.prepare(request)
        await handler(socket)
        return socket

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", accept)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


async def echo(socket: web.WebSocketResponse) -> None:
    async for message in socket:
        if message.type is WSMsgType.TEXT:
            await socket.send_str(message.data)
        elif message.type is WSMsgType.BINARY:
            await socket.send_bytes(message.data)
        elif message.type is WSMsgType.PING:
            await socket.pong(message.data)


async def test_a_websocket_holds_its_models_lease_until_it_closes(serve_proxy: Serve) -> None:
    async with FakeSwapper(["q", "t"]) as swapper:
        proxy = await serve_proxy(in_front_of(swapper.url))
        async with proxy.http.ws_connect("/upstream/t/ws") as socket:
            await socket.send_str("hi")
            assert (await socket.receive()).data == "t: hi"
            [holder] = (await proxy.lease())["holders"]
            assert (holder["model"], holder["mode"], holder["opened"]) == ("t", "write", True)
            waiting = asyncio.create_task(proxy.chat("q"))
            await proxy.until(waiting=1)
            await socket.send_str("still here")
            assert (await socket.receive()).data == "t: still here"
        assert (await waiting).status == 200
        await proxy.idle()
        assert swapper.in_flight == {}


async def test_a_websocket_without_a_model_takes_no_lease(serve_proxy: Serve) -> None:
    async with upstream(echo) as url:
        proxy = await serve_proxy(in_front_of(url))
        async with proxy.http.ws_connect("/logs/stream") as socket:
            await socket.send_str("hi")
            await socket.receive()
            assert (await proxy.lease())["holders"] == []


async def test_a_websocket_names_its_model_in_the_query_where_the_path_does_not(serve_proxy: Serve) -> None:
    requests: list[web.Request] = []
    async with upstream(echo, requests) as url:
        proxy = await serve_proxy(in_front_of(url, aliases={"realtime": "org/t"}))
        async with proxy.http.ws_connect("/v1/realtime?model=realtime&x=%2F") as socket:
            await socket.send_str("hi")
            await socket.receive()
            assert [holder["model"] for holder in (await proxy.lease())["holders"]] == ["org/t"]
        assert dict(requests[0].query) == {"model": "org/t", "x": "/"}
        await proxy.idle()


async def test_messages_of_every_kind_and_size_pass_both_ways(serve_proxy: Serve) -> None:
    async with upstream(echo) as url:
        proxy = await serve_proxy(in_front_of(url))
        async with proxy.http.ws_connect("/upstream/m/ws", max_msg_size=0, autoping=False) as socket:
            for text in ("", "é\u2028", "x" * 100_000):
                await socket.send_str(text)
                assert (await socket.receive()).data == text
            for data in (b"", bytes(range(256)), bytes(8 << 20)):
                await socket.send_bytes(data)
                assert (await socket.receive()).data == data
            await socket.ping(b"are you there")
            pong = await socket.receive()
            assert (pong.type, bytes(pong.data)) == (WSMsgType.PONG, b"are you there")
        await proxy.idle()


async def test_the_clients_close_reaches_the_upstream_with_its_code(serve_proxy: Serve) -> None:
    closed: asyncio.Future[tuple[int | None, Any]] = asyncio.get_running_loop().create_future()

    async def wait(socket: web.WebSocketResponse) -> None:
        message = await socket.receive()
        closed.set_result((socket.close_code, message.extra))

    async with upstream(wait) as url:
        proxy = await serve_proxy(in_front_of(url))
        socket = await proxy.http.ws_connect("/upstream/m/ws")
        await socket.close(code=4001, message=b"enough")
        assert await closed == (4001, "enough")
        await proxy.idle()


async def test_the_upstreams_close_reaches_the_client_with_its_code(serve_proxy: Serve) -> None:
    async def close(socket: web.WebSocketResponse) -> None:
        await socket.close(code=4002, message=b"done")

    async with upstream(close) as url:
        proxy = await serve_proxy(in_front_of(url))
        async with proxy.http.ws_connect("/upstream/m/ws") as socket:
            message = await socket.receive()
            assert (message.type, message.data, message.extra) == (WSMsgType.CLOSE, 4002, "done")
        await proxy.idle()


async def test_an_upstream_that_vanishes_closes_the_client_with_an_error(serve_proxy: Serve) -> None:
    async def vanish(socket: web.WebSocketResponse) -> None:
        await socket.receive()
        request = socket._req
        assert request is not None
        assert request.transport is not None
        request.transport.abort()

    async with upstream(vanish) as url:
        proxy = await serve_proxy(in_front_of(url))
        async with proxy.http.ws_connect("/upstream/m/ws") as socket:
            await socket.send_str("go")
            message = await socket.receive()
            assert (message.type, message.data) == (WSMsgType.CLOSE, 1011)
        await proxy.idle()


async def test_a_client_that_vanishes_frees_the_lease_and_the_upstream(serve_proxy: Serve) -> None:
    async with FakeSwapper(["t"]) as swapper:
        proxy = await serve_proxy(in_front_of(swapper.url))
        socket = await proxy.http.ws_connect("/upstream/t/ws")
        await socket.send_str("hi")
        await socket.receive()
        assert socket._response.connection is not None
        assert socket._response.connection.transport is not None
        socket._response.connection.transport.abort()
        await proxy.idle()
        await swapper.until("done")
        assert swapper.in_flight == {}


async def test_a_websocket_that_holds_too_long_is_closed_with_the_reason(serve_proxy: Serve) -> None:
    async with upstream(echo) as url:
        proxy = await serve_proxy(in_front_of(url, lease={"max_hold": 0.5}))
        async with proxy.http.ws_connect("/upstream/t/ws") as socket:
            message = await socket.receive()
            assert (message.type, message.data) == (WSMsgType.CLOSE, 1011)
            assert "held the GPU for longer" in str(message.extra)
        await proxy.idle()


async def test_a_websocket_can_be_taken_out_by_an_administrator(serve_proxy: Serve) -> None:
    async with upstream(echo) as url:
        proxy = await serve_proxy(in_front_of(url))
        async with proxy.http.ws_connect("/upstream/t/ws", headers={"X-Request-Id": "talk"}) as socket:
            await proxy.until(holding=1)
            await proxy.ask("DELETE", "/lease/talk")
            message = await socket.receive()
            assert (message.type, message.data) == (WSMsgType.CLOSE, 1011)
            assert "administrator" in str(message.extra)
        await proxy.idle()


ID = "0b8f1c5e-6a53-4c61-a3a4-4b1cf4e8a0de"


async def test_the_handshake_carries_headers_and_protocol_but_not_the_clients_key(serve_proxy: Serve) -> None:
    requests: list[web.Request] = []
    async with upstream(echo, requests) as url:
        proxy = await serve_proxy(in_front_of(url, upstream={"api_key": "theirs"}))
        headers = {"Authorization": "Bearer mine", "X-Custom": "1", "X-Request-Id": ID}
        async with proxy.http.ws_connect(
            "/upstream/a%2Fb/ws/?q=1", headers=headers, protocols=["chat.v1", "chat.v2"]
        ) as socket:
            assert socket.protocol == "chat.v2"
        sent = requests[0].headers
        assert (sent["Authorization"], sent["X-Custom"], sent["X-Request-Id"]) == ("Bearer theirs", "1", ID)
        assert requests[0].raw_path == "/upstream/a%2Fb/ws/?q=1"
        await proxy.idle()


async def refused(proxy: Served, path: str, **headers: str) -> int:
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await proxy.http.ws_connect(path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    return caught.value.status


async def test_an_upstream_without_websockets_is_502(fault: StartFault) -> None:
    f = await fault(faults.ok)
    assert await refused(f.proxy, "/upstream/m/ws") == 502


async def test_an_upstream_that_does_not_answer_the_handshake_is_504(fault: StartFault) -> None:
    f = await fault(faults.never_answers, upstream={"timeouts": {"first_byte": 0.05}})
    assert await refused(f.proxy, "/upstream/t/ws") == 504
    await f.upstream.exchanges[0].gone.wait()


async def test_where_nobody_listens_a_websocket_is_502(serve_proxy: Serve) -> None:
    with refusing_url() as url:
        proxy = await serve_proxy(in_front_of(url))
        assert await refused(proxy, "/upstream/m/ws") == 502
        await proxy.idle()


async def test_a_websocket_waits_in_line_and_leaves_it_with_its_client(fault: StartFault) -> None:
    f = await fault(faults.stalls_after(1))
    async with f.proxy.raw() as holder, f.proxy.raw() as client:
        await holder.post("/v1/chat/completions", chat("t", stream=True))
        await f.upstream.until(1)
        await client.head("GET", "/upstream/m/ws", Connection="Upgrade", Upgrade="websocket",
                          Sec_WebSocket_Version="13", Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZQ==")  # fmt: skip
        await f.proxy.until(waiting=1)
        client.hang_up()
        await f.proxy.until(waiting=0, holding=1)


async def test_a_client_that_goes_during_the_handshake_frees_the_lease(fault: StartFault) -> None:
    f = await fault(faults.never_answers)
    async with f.proxy.raw() as client:
        await client.head("GET", "/upstream/t/ws", Connection="Upgrade", Upgrade="websocket",
                          Sec_WebSocket_Version="13", Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZQ==")  # fmt: skip
        exchange = await f.upstream.until(1)
        client.hang_up()
        await exchange.gone.wait()


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("http://evil.com", "localhost", 403),
        ("null", "localhost", 403),
        ("http://localhost:3000", "127.0.0.1", 101),
        ("https://gpu.home:9292", "gpu.home:9292", 101),
    ],
)
async def test_a_browser_opens_websockets_for_our_own_and_for_allowed_pages_only(
    serve_proxy: Serve, origin: str, host: str, status: int
) -> None:
    async with upstream(echo) as url:
        proxy = await serve_proxy(in_front_of(url, allowed_hosts=["loopback", "gpu.home"]))
        if status == 403:
            assert await refused(proxy, "/upstream/m/ws", Origin=origin, Host=host) == status
        else:
            async with proxy.http.ws_connect("/upstream/m/ws", headers={"Origin": origin, "Host": host}) as socket:
                await socket.send_str("hi")
                assert (await socket.receive()).data == "hi"
        await proxy.idle()


async def test_a_websocket_needs_a_key_too(serve_proxy: Serve) -> None:
    async with upstream(echo) as url:
        proxy = await serve_proxy(in_front_of(url, api_keys=["good"]))
        assert await refused(proxy, "/upstream/m/ws") == 401
        proxy.http.headers["Authorization"] = "Bearer good"
        async with proxy.http.ws_connect("/upstream/m/ws") as socket:
            await socket.send_str("hi")
            assert (await socket.receive()).data == "hi"
        await proxy.idle()
