"""What goes on to an upstream, and what comes back: bytes, headers, paths and keys."""

import asyncio
import gzip
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from io import BytesIO
from typing import Any

import pytest

from tests.fakes import Exchange, FakeModel, FakeSwapper, faults, text
from tests.fakes.answers import JSON
from tests.fakes.faulty import Behaviour
from tests.proxy.conftest import StartFault
from tests.proxy.served import CHAT, Served, chat, in_front_of

Serve = Callable[[Mapping[str, Any]], Awaitable[Served]]


def answers(status: int, headers: Mapping[str, str], body: bytes = b"{}") -> Behaviour:
    async def behave(exchange: Exchange) -> None:
        await exchange.whole(status, body, headers)

    return behave


# Bodies


async def test_a_body_goes_on_byte_for_byte(fault: StartFault) -> None:
    f = await fault(faults.ok)
    body = b' { "messages":[ ],\r\n "x": 1.50, "y": "\\u00e9\xc3\xa9\xe2\x80\xa8", "model" :"m" , "z":1e2}\n'
    await f.proxy.ask("POST", CHAT, data=body, headers={"Content-Type": "application/json; charset=utf-8"})
    [exchange] = f.upstream.exchanges
    assert exchange.body == body
    assert exchange.headers["content-type"] == "application/json; charset=utf-8"
    assert exchange.headers["content-length"] == str(len(body))


async def test_20_mb_go_up_and_come_down_unchanged(fault: StartFault) -> None:
    size = 20 << 20
    f = await fault(faults.huge(size))
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    tail = b'\r\n--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--x--\r\n'
    body = head + random.Random(1).randbytes(size) + tail
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    reply = await f.proxy.ask("POST", "/v1/audio/transcriptions", data=BytesIO(body), headers=headers)
    [exchange] = f.upstream.exchanges
    assert exchange.body == body
    assert (exchange.headers["content-type"], exchange.headers["content-length"]) == (
        headers["Content-Type"],
        str(len(body)),
    )
    assert reply.body == bytes(range(256)) * (size // 256)
    assert reply.headers["Content-Length"] == str(size)


async def test_a_chunked_upload_goes_on_with_its_length(fault: StartFault) -> None:
    f = await fault(faults.ok)
    body = json.dumps(chat()).encode()
    async with f.proxy.raw() as client:
        await client.head("POST", CHAT, None, Content_Type=JSON, Transfer_Encoding="chunked")
        for at in range(0, len(body), 7):
            piece = body[at : at + 7]
            await client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        await client.send(b"0\r\n\r\n")
        assert (await client.read_head())[0] == 200
    [exchange] = f.upstream.exchanges
    assert (exchange.body, exchange.headers["content-length"]) == (body, str(len(body)))
    assert "transfer-encoding" not in exchange.headers


async def test_a_gzip_body_goes_on_as_it_came(fault: StartFault) -> None:
    f = await fault(faults.ok)
    body = gzip.compress(json.dumps(chat()).encode())
    headers = {"Content-Type": JSON, "Content-Encoding": "gzip"}
    assert (await f.proxy.ask("POST", CHAT, data=body, headers=headers)).status == 200
    [exchange] = f.upstream.exchanges
    assert (exchange.body, exchange.headers["content-encoding"]) == (body, "gzip")


@pytest.mark.parametrize(("alias", "model"), [("gpt-4o", "qwen"), ("gpt-4", "qwen"), ("é", "日本")])
async def test_an_alias_becomes_its_models_name_and_nothing_else_changes(
    fault: StartFault, alias: str, model: str
) -> None:
    f = await fault(faults.ok, aliases={"gpt-4o": "qwen", "gpt-4": "qwen", "é": "日本"})
    before, after = (f' {{"x":1.0, "model" : "{name}" , "z": "é"}}'.encode() for name in (alias, model))
    await f.proxy.ask("POST", CHAT, data=before, headers={"Content-Type": JSON})
    [exchange] = f.upstream.exchanges
    assert json.loads(exchange.body) == json.loads(after)
    assert exchange.body.startswith(b' {"x":1.0, "model" : "')
    assert exchange.body.endswith('" , "z": "é"}'.encode())
    assert exchange.headers["content-length"] == str(len(exchange.body))


async def test_an_alias_is_renamed_inside_a_gzip_body_too(fault: StartFault) -> None:
    f = await fault(faults.ok, aliases={"gpt-4o": "qwen"})
    body = gzip.compress(json.dumps(chat("gpt-4o")).encode())
    await f.proxy.ask("POST", CHAT, data=body, headers={"Content-Type": JSON, "Content-Encoding": "gzip"})
    [exchange] = f.upstream.exchanges
    assert exchange.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(exchange.body)) == chat("qwen")


async def test_an_alias_is_renamed_in_a_query_and_in_an_unload(fault: StartFault) -> None:
    f = await fault(faults.ok, faults.ok, aliases={"gpt-4o": "org/qwen"})
    await f.proxy.ask("GET", "/props?a=1&model=gpt-4o&b=%2F")
    await f.proxy.ask("POST", "/api/models/unload/gpt-4o")
    props, unload = f.upstream.exchanges
    assert props.target.startswith("/props?")
    assert set(props.target.partition("?")[2].split("&")) == {"a=1", "model=org/qwen", "b=/"}
    assert unload.target == "/api/models/unload/org/qwen"


# Answers


async def test_a_gzip_answer_comes_back_with_its_encoding_and_its_length(fault: StartFault) -> None:
    f = await fault(faults.gzipped)
    async with f.proxy.http.post(CHAT, json=chat(), auto_decompress=False) as reply:
        body = await reply.read()
        assert (reply.headers["Content-Encoding"], reply.headers["Content-Length"]) == ("gzip", str(len(body)))
        assert gzip.decompress(body) == faults.TEXT.body


@pytest.mark.parametrize(
    ("status", "reason"), [(200, "OK"), (201, "Made Up"), (400, "Bad"), (418, "Teapot"), (599, "Odd")]
)
async def test_status_and_reason_come_back(fault: StartFault, status: int, reason: str) -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.head(status, {"Content-Length": "0"}, reason)

    f = await fault(behave)
    async with f.proxy.http.post(CHAT, json=chat()) as reply:
        assert (reply.status, reply.reason) == (status, reason)


async def test_headers_of_an_answer_come_back_and_those_of_the_hop_do_not(fault: StartFault) -> None:
    async def behave(exchange: Exchange) -> None:
        lines = [
            "HTTP/1.1 200 OK", "Content-Type: Text/Plain; Charset=x", "Content-Length: 2", "X-Upstream: 1",
            "Set-Cookie: a=1", "Set-Cookie: b=2", "Connection: X-Hop", "X-Hop: 1", "Keep-Alive: timeout=5",
            "Proxy-Authenticate: x", "Access-Control-Allow-Origin: *", "X-Request-Id: theirs", "Server-Timing: db;dur=1",
        ]  # fmt: skip
        await exchange.raw("\r\n".join(lines).encode() + b"\r\n\r\nok")

    f = await fault(behave)
    reply = await f.proxy.chat(headers={"X-Request-Id": "mine"})
    assert reply.headers.getall("Set-Cookie") == ["a=1", "b=2"]
    assert (reply.headers["X-Upstream"], reply.headers["Content-Type"]) == ("1", "Text/Plain; Charset=x")
    assert not {"X-Hop", "Keep-Alive", "Proxy-Authenticate", "Access-Control-Allow-Origin"} & set(reply.headers)
    assert reply.headers.getall("X-Request-Id") == ["mine"]
    assert reply.headers.getall("Server-Timing")[0].startswith("lease;dur=")


@pytest.mark.parametrize(
    ("kind", "length", "told"),
    [("text/event-stream", None, True), ("audio/wav", None, True), ("audio/wav", "0", False), (JSON, None, False)],
)
async def test_streams_and_streamed_audio_are_not_to_be_held_back(
    fault: StartFault, kind: str, length: str | None, told: bool
) -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.head(
            201, {"Content-Type": kind, **({"Content-Length": length} if length else {"Connection": "close"})}
        )
        exchange.writer.close()

    f = await fault(behave)
    headers = (await f.proxy.chat()).headers
    assert (headers.get("X-Accel-Buffering"), headers.get("Cache-Control")) == (
        ("no", "no-cache") if told else (None, None)
    )


async def test_a_redirect_is_passed_on_and_not_followed(fault: StartFault) -> None:
    f = await fault(answers(307, {"Location": "/elsewhere"}))
    reply = await f.proxy.ask("POST", CHAT, json=chat(), allow_redirects=False)
    assert (reply.status, reply.headers["Location"], len(f.upstream.exchanges)) == (307, "/elsewhere", 1)


# Headers of a request


async def test_headers_go_on_and_those_of_the_hop_do_not(fault: StartFault) -> None:
    f = await fault(faults.ok)
    body = json.dumps(chat()).encode()
    async with f.proxy.raw() as client:
        await client.head(
            "POST", CHAT, len(body), Content_Type=JSON, Connection="X-Hop, keep-alive", X_Hop="1", TE="trailers",
            Keep_Alive="1", Proxy_Authorization="Basic x", Upgrade="h2c", X_Max_Wait="60", X_Custom="stays",
            X_Stainless_Os="Linux", Accept="*/*", Origin="http://localhost", Cookie="a=b",
        )  # fmt: skip
        await client.send(body)
        assert (await client.read_head())[0] == 200
    [exchange] = f.upstream.exchanges
    assert set(exchange.headers) == {
        "host", "content-type", "content-length", "x-custom", "x-stainless-os", "accept", "cookie", "x-request-id",
    }  # fmt: skip
    assert exchange.headers["host"] == f.upstream.url.removeprefix("http://")


async def test_nothing_is_added_that_the_client_did_not_say(fault: StartFault) -> None:
    f = await fault(faults.ok)
    async with f.proxy.raw() as client:
        await client.head("GET", "/running")
        assert (await client.read_head())[0] == 200
    assert set(f.upstream.exchanges[0].headers) == {"host", "x-request-id"}


CLIENT_KEYS = [{"Authorization": "Bearer client"}, {"X-Api-Key": "client"}, {"Authorization": "Basic Y2xpZW50"}]


@pytest.mark.parametrize("headers", CLIENT_KEYS)
async def test_the_clients_key_never_reaches_the_upstream(fault: StartFault, headers: dict[str, str]) -> None:
    f = await fault(faults.ok)
    assert (await f.proxy.chat(headers=headers)).status == 200
    assert not {"authorization", "x-api-key"} & set(f.upstream.exchanges[0].headers)


@pytest.mark.parametrize("headers", CLIENT_KEYS)
async def test_the_upstreams_own_key_is_put_in(fault: StartFault, headers: dict[str, str]) -> None:
    f = await fault(faults.ok, upstream={"api_key": "upstream", "forward_client_key": True})
    await f.proxy.chat(headers=headers)
    sent = f.upstream.exchanges[0].headers
    assert (sent["authorization"], sent.get("x-api-key")) == ("Bearer upstream", None)


@pytest.mark.parametrize("headers", CLIENT_KEYS)
async def test_the_clients_key_goes_on_where_that_is_asked_for(fault: StartFault, headers: dict[str, str]) -> None:
    f = await fault(faults.ok, upstream={"forward_client_key": True})
    await f.proxy.chat(headers=headers)
    sent = f.upstream.exchanges[0].headers
    assert {name: sent.get(name.lower()) for name in headers} == headers


# Paths


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("//v1//chat///completions//", "/v1/chat/completions"),
        ("/v1/chat/completions?a=%2F+%20&a=2&b", "/v1/chat/completions?a=%2F+%20&a=2&b"),
        ("/v1/chat/completions/?x", "/v1/chat/completions?x"),
    ],
)
async def test_slashes_too_many_are_forgiven_and_the_query_stays(fault: StartFault, asked: str, sent: str) -> None:
    f = await fault(faults.ok)
    body = json.dumps(chat()).encode()
    async with f.proxy.raw() as client:
        await client.head("POST", asked, len(body), Content_Type=JSON)
        await client.send(body)
        assert (await client.read_head())[0] == 200
    assert f.upstream.exchanges[0].target == sent


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ("/upstream/org%2Fm/v1/models", "/upstream/org%2Fm/v1/models"),
        ("/upstream/a%20b/x%3Fy?q=%23", "/upstream/a%20b/x%3Fy?q=%23"),
        ("/upstream/m/", "/upstream/m/"),
        ("/ui/", "/ui/"),
        ("/", "/"),
        ("//ui//", "/ui/"),
        ("/api/events", "/api/events"),
    ],
)
async def test_a_path_goes_on_as_it_came_with_its_last_slash(fault: StartFault, asked: str, sent: str) -> None:
    """A swapper redirects /ui to /ui/ and /upstream/m to /upstream/m/: without the slash that would never end."""
    f = await fault(faults.ok)
    async with f.proxy.raw() as client:
        await client.head("GET", asked)
        assert (await client.read_head())[0] == 200
    assert f.upstream.exchanges[0].target == sent


async def test_an_upstreams_url_may_have_a_path_of_its_own(fault: StartFault, serve_proxy: Serve) -> None:
    f = await fault(faults.ok)
    proxy = await serve_proxy(in_front_of(f.upstream.url + "/swap/"))
    await proxy.chat()
    assert f.upstream.exchanges[0].target == "/swap" + CHAT


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "PROPFIND"])
async def test_other_methods_go_on_with_their_bodies(fault: StartFault, method: str) -> None:
    f = await fault(faults.ok)
    await f.proxy.ask(method, "/v1/files/x", data=b"abc")
    [exchange] = f.upstream.exchanges
    assert (exchange.method, exchange.target, exchange.body) == (method, "/v1/files/x", b"abc")


async def test_head_comes_back_with_its_length_and_without_a_body(fault: StartFault) -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.head(200, {"Content-Type": JSON, "Content-Length": "1234"})

    f = await fault(behave)
    async with f.proxy.raw() as client:
        await client.head("HEAD", CHAT, Connection="close")
        status, headers = await client.read_head()
        assert (status, headers["content-length"], await client.read_rest()) == (200, "1234", b"")


@pytest.mark.parametrize(
    ("raw", "length"),
    [
        (b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", "2"),
        (b"Content-Length: 2\r\n\r\n{}", "2"),
        (b"Content-Length: 0\r\n\r\n", "0"),
    ],
)
async def test_an_answer_that_came_as_a_whole_goes_on_with_its_length(
    fault: StartFault, raw: bytes, length: str
) -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.raw(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + raw)

    f = await fault(behave)
    reply = await f.proxy.chat()
    assert (reply.status, reply.body, reply.headers["Content-Length"]) == (200, b"{}"[: int(length)], length)
    assert "Transfer-Encoding" not in reply.headers
    assert reply.headers["Server-Timing"].startswith("lease;dur=")


# The lease and what needs none


async def test_head_and_options_and_paths_without_a_model_go_past_a_waiting_line(fault: StartFault) -> None:
    async def no_body(exchange: Exchange) -> None:
        await exchange.head(200, {"Content-Length": "5"})

    f = await fault(faults.stalls_after(1), no_body)
    async with f.proxy.raw() as holder:
        await holder.post(CHAT, chat("t", stream=True))
        await f.upstream.until(1)
        waiting = asyncio.create_task(f.proxy.chat())
        await f.proxy.until(waiting=1)
        assert (await f.proxy.ask("HEAD", CHAT)).status == 200
        assert (await f.proxy.ask("OPTIONS", CHAT)).status == 204
        assert (await f.proxy.ask("GET", "/running")).status == 200
        assert (await f.proxy.chat("e", path="/v1/embeddings")).status == 200
        assert not waiting.done()
    assert (await waiting).status == 200


async def test_the_wait_is_told_in_server_timing(fault: StartFault) -> None:
    f = await fault(faults.stalls_after(1), faults.ok, faults.ok)
    async with f.proxy.raw() as holder:
        await holder.post(CHAT, chat("t", stream=True))
        await f.upstream.until(1)
        waiting = asyncio.create_task(f.proxy.chat())
        while (await f.proxy.until(waiting=1))["waiting"][0]["waited"] < 0.05:
            pass
    assert float((await waiting).headers["Server-Timing"].removeprefix("lease;dur=")) >= 50
    assert float((await f.proxy.chat()).headers["Server-Timing"].removeprefix("lease;dur=")) < 50
    assert "Server-Timing" not in (await f.proxy.ask("GET", "/health")).headers


async def test_no_more_than_max_in_flight_of_a_model_are_at_the_upstream(serve_proxy: Serve) -> None:
    async with FakeSwapper({"q": FakeModel(limit=3), "v": FakeModel(limit=3)}, matrix="q & v") as swapper:
        proxy = await serve_proxy(in_front_of(swapper.url, upstream={"max_in_flight": 3}))
        replies = await asyncio.gather(*(proxy.chat("qv"[n % 2], content=str(n)) for n in range(40)))
        assert {reply.status for reply in replies} == {200}
        assert swapper.events_of("refused") == []
        assert max(swapper.most_in_flight.values()) <= 3
        await proxy.idle()


async def test_unloading_waits_for_running_requests_and_runs_alone(serve_proxy: Serve) -> None:
    async with FakeSwapper(["q"]) as swapper:
        proxy = await serve_proxy(in_front_of(swapper.url))
        gate = swapper.hold("q", after=5)
        running = asyncio.create_task(proxy.chat("q", stream=True))
        await gate.reached.wait()
        unloading = [
            asyncio.create_task(proxy.ask("POST", "/api/models/unload")),
            asyncio.create_task(proxy.ask("POST", "/api/models/unload/q")),
            asyncio.create_task(proxy.ask("GET", "/unload")),
        ]
        assert {waiter["mode"] for waiter in (await proxy.until(waiting=3))["waiting"]} == {"write"}
        gate.open()
        assert b"[DONE]" in (await running).body
        assert [(await task).status for task in unloading] == [200] * 3
        assert swapper.events_of("killed") == []
        await proxy.idle()


async def test_two_names_of_one_model_are_answered_by_it(serve_proxy: Serve) -> None:
    async with FakeSwapper(["q"]) as swapper:
        proxy = await serve_proxy(in_front_of(swapper.url, aliases={"gpt-4o": "q", "gpt-4o-mini": "q"}))
        for name in ("q", "gpt-4o", "gpt-4o-mini"):
            said = json.loads((await proxy.chat(name)).body)["choices"][0]["message"]["content"]
            assert said == text("q", "hello")
        assert swapper.loads == ["q"]


async def test_two_upstreams_answer_for_their_own_models(serve_proxy: Serve) -> None:
    async with FakeSwapper(["q"]) as one, FakeSwapper(["v"]) as two:
        settings = in_front_of(one.url)
        settings["upstreams"]["two"] = {"url": two.url}
        settings["groups"]["vision"] = {"mode": "read", "models": ["v*"], "upstream": "two"}
        proxy = await serve_proxy(settings)
        assert [(await proxy.chat(model)).status for model in ("q", "v")] == [200, 200]
        assert (one.loads, two.loads) == (["q"], ["v"])
