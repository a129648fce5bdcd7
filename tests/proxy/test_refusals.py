"""Requests that are refused: with the right status and shape, before any lease, whatever the HTTP underneath."""

import gzip
import json
from collections.abc import Awaitable, Callable, Mapping
from io import BytesIO
from typing import Any

import pytest

from tests.fakes import RawClient, faults
from tests.fakes.answers import JSON
from tests.proxy.conftest import StartFault
from tests.proxy.served import CHAT, Served, chat, in_front_of

Serve = Callable[[Mapping[str, Any]], Awaitable[Served]]
KEY = {"Authorization": "Bearer good"}
FORM = "multipart/form-data; boundary=x"


async def untouched(proxy: Served) -> None:
    """No request has ever been in line."""
    page = (await proxy.ask("GET", "/metrics", headers=KEY)).body.decode()
    counts = [line for line in page.splitlines() if line.startswith("llama_lease_lease_wait_seconds_count")]
    assert all(float(line.split()[-1]) == 0 for line in counts)


# Bad input


@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        (b"", JSON, "body"),
        (b"{", JSON, "body"),
        (b"[]", JSON, "body"),
        (b'{"model":"\xff"}', JSON, "body"),
        (b'{"a":' * 10_000, JSON, "body"),
        (b"{}", JSON, "model"),
        (b'{"model":null}', JSON, "model"),
        (b'{"model":7}', JSON, "model"),
        (b'{"model":""}', JSON, "model"),
        (b'{"model":"m","model":"n"}', JSON, "model"),
        (b'{"model":"a\\nb"}', JSON, "model"),
        (b'{"model":"\\ud800"}', JSON, "model"),
        (b"a=b", "text/html", "model"),
        (b"junk", FORM, "body"),
        (b"--x--\r\n", FORM, "model"),
        (b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x--', "multipart/form-data", "body"),
    ],
)
async def test_bad_input_is_400_with_the_field_and_never_in_line(
    fault: StartFault, body: bytes, kind: str, param: str
) -> None:
    f = await fault(faults.ok)
    for path in (CHAT, "/v1/audio/transcriptions"):
        reply = await f.proxy.ask("POST", path, data=body, headers={"Content-Type": kind})
        assert (reply.status, reply.error["param"], reply.error["type"]) == (400, param, "invalid_request_error")
    reply = await f.proxy.ask("POST", "/v1/messages", data=body, headers={"Content-Type": kind})
    assert (reply.status, json.loads(reply.body)["error"]["type"]) == (400, "invalid_request_error")
    assert f.upstream.exchanges == []
    await untouched(f.proxy)


@pytest.mark.parametrize("encoding", ["gzip", "br"])
async def test_a_body_that_is_not_what_its_encoding_says_is_400(fault: StartFault, encoding: str) -> None:
    f = await fault(faults.ok)
    headers = {"Content-Type": JSON, "Content-Encoding": encoding}
    assert (await f.proxy.ask("POST", CHAT, data=b"{}", headers=headers)).status == 400
    await untouched(f.proxy)


async def test_a_query_without_its_model_is_400(fault: StartFault) -> None:
    f = await fault(faults.ok)
    for path in ("/props", "/props?model="):
        assert (await f.proxy.ask("GET", path)).error["param"] == "model"
    await untouched(f.proxy)


async def test_an_unknown_model_is_404(serve_proxy: Serve) -> None:
    settings = in_front_of("http://127.0.0.1:9")
    settings["default_group"] = None
    proxy = await serve_proxy(settings)
    reply = await proxy.chat("unheard-of")
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
    await untouched(proxy)


@pytest.mark.parametrize("value", ["soon", "-1", "nan", ""])
async def test_an_x_max_wait_that_is_no_number_is_400(fault: StartFault, value: str) -> None:
    f = await fault(faults.ok)
    reply = await f.proxy.chat(headers={"X-Max-Wait": value})
    assert (reply.status, reply.error["param"]) == (400, "X-Max-Wait")
    await untouched(f.proxy)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("POST", "/health", "GET, HEAD"), ("PUT", "/v1/models", "GET, HEAD"), ("GET", "/lease/x", "DELETE")],
)
async def test_another_method_on_our_own_page_is_405_and_tells_which_are_right(
    fault: StartFault, method: str, path: str, allowed: str
) -> None:
    f = await fault(faults.ok)
    reply = await f.proxy.ask(method, path)
    assert (reply.status, reply.headers["Allow"]) == (405, allowed)
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/lease/ui/../../v1/chat/completions", "/x/%2e%2e/v1/chat/completions", "/./health"])
async def test_a_path_with_dot_segments_is_400_and_gets_past_neither_key_nor_lease(
    serve_proxy: Serve, path: str
) -> None:
    proxy = await serve_proxy(in_front_of("http://127.0.0.1:9", api_keys=["good"]))
    async with proxy.raw() as client:
        await client.post(path, chat())
        status, headers = await client.read_head()
        assert (status, json.loads(await client.read_body(headers))["error"]["param"]) == (400, "path")


async def test_a_path_in_percent_signs_takes_the_lease_all_the_same(fault: StartFault) -> None:
    f = await fault(faults.ok)
    async with f.proxy.raw() as client:
        await client.post("/v1/ch%61t/completions", chat())
        _, headers = await client.read_head()
    assert "server-timing" in headers
    assert f.upstream.exchanges[0].target == CHAT


# Too large


@pytest.mark.parametrize("path", [CHAT, "/v1/audio/speech", "/v1/files"])
async def test_a_body_over_the_limit_is_413_before_it_has_come(fault: StartFault, path: str) -> None:
    f = await fault(faults.ok, max_body=1000)
    async with f.proxy.raw() as client:
        await client.head("POST", path, 1001, Content_Type=JSON)
        status, headers = await client.read_head()
        error = json.loads(await client.read_body(headers))["error"]
    assert (status, error["code"], error["type"]) == (413, "body_too_large", "invalid_request_error")
    assert headers["connection"] == "close"
    assert f.upstream.exchanges == []
    await untouched(f.proxy)


async def test_a_refusal_after_the_whole_body_leaves_the_connection_open(fault: StartFault) -> None:
    f = await fault(faults.ok)
    async with f.proxy.raw() as client:
        for _ in range(2):
            await client.post(CHAT, {"model": 7})
            status, headers = await client.read_head()
            await client.read_body(headers)
            assert (status, headers.get("connection")) == (400, None)


async def test_the_limit_holds_while_a_chunked_body_still_comes(fault: StartFault) -> None:
    f = await fault(faults.ok, max_body=1000)
    async with f.proxy.raw() as client:
        await client.head("POST", CHAT, None, Content_Type=JSON, Transfer_Encoding="chunked")
        await client.send(b"3e9\r\n" + b"x" * 1001 + b"\r\n")  # and no end
        status, headers = await client.read_head()
        assert (status, json.loads(await client.read_body(headers))["error"]["code"]) == (413, "body_too_large")


async def test_the_limit_holds_for_what_a_gzip_body_grows_to(fault: StartFault) -> None:
    f = await fault(faults.ok, max_body=10_000)
    body = gzip.compress(json.dumps(chat(filler="x" * 100_000)).encode())
    headers = {"Content-Type": JSON, "Content-Encoding": "gzip"}
    assert (await f.proxy.ask("POST", CHAT, data=body, headers=headers)).status == 413


async def test_by_default_bodies_of_many_megabytes_pass(fault: StartFault) -> None:
    f = await fault(faults.ok)
    body = json.dumps(chat(filler="x" * (8 << 20))).encode()
    reply = await f.proxy.ask("POST", CHAT, data=BytesIO(body), headers={"Content-Type": JSON})
    assert reply.status == 200


# Who may call


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (KEY, 200),
        ({"X-Api-Key": "good"}, 200),
        ({}, 401),
        ({"Authorization": "Bearer bad"}, 401),
        ({"X-Api-Key": ""}, 401),
    ],
)
async def test_only_a_good_key_gets_in(fault: StartFault, headers: dict[str, str], status: int) -> None:
    f = await fault(faults.ok, api_keys=["good", "next"])
    f.proxy.http.headers["Authorization"] = "Bearer next"
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat(), **{name.replace("-", "_"): value for name, value in headers.items()})
        got, answered = await client.read_head()
        body = json.loads(await client.read_body(answered))
    assert got == status
    if status == 401:
        assert answered["www-authenticate"] == "Bearer"
        assert (body["error"]["code"], body["error"]["type"]) == ("invalid_api_key", "authentication_error")
        assert f.upstream.exchanges == []


async def test_a_refused_key_has_anthropics_shape_on_messages(serve_proxy: Serve) -> None:
    proxy = await serve_proxy(in_front_of("http://127.0.0.1:9", api_keys=["good"]))
    reply = await proxy.chat(path="/v1/messages")
    said = json.loads(reply.body)
    assert (reply.status, said["type"], said["error"]["type"]) == (401, "error", "authentication_error")
    assert set(said["error"]) == {"type", "message"}


@pytest.mark.parametrize("path", ["/health", CHAT, "/v1/messages", "/lease/ui"])
async def test_a_foreign_host_is_403_everywhere(serve_proxy: Serve, path: str) -> None:
    proxy = await serve_proxy(in_front_of("http://127.0.0.1:9"))
    assert (await proxy.ask("GET", path, headers={"Host": "evil.com"})).status == 403
    await untouched(proxy)


async def test_options_needs_no_key_and_no_lease_and_echoes_what_a_page_asks_for(serve_proxy: Serve) -> None:
    proxy = await serve_proxy(in_front_of("http://127.0.0.1:9", api_keys=["good"]))
    for path in (CHAT, "/v1/models", "/lease/x", "/upstream/m/x"):
        asked = {"Origin": "http://localhost:3000", "Access-Control-Request-Headers": "authorization, x-stainless-lang"}
        reply = await proxy.ask("OPTIONS", path, headers={**asked, "Access-Control-Request-Method": "POST"})
        assert reply.status == 204
        assert reply.headers["Access-Control-Allow-Origin"] == "http://localhost:3000"
        assert reply.headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-lang"
        assert "POST" in reply.headers["Access-Control-Allow-Methods"]


# CORS and the request's id are on every answer


async def test_cors_and_the_id_are_on_every_answer(fault: StartFault) -> None:
    f = await fault(
        faults.ok, faults.ok, faults.refuses(500), faults.truncated, max_body=5000, lease={"heartbeat": 0.0}
    )
    headers = {"Origin": "http://localhost:3000", "X-Request-Id": "my-id", "Content-Type": JSON}
    whole, stream = json.dumps(chat()).encode(), json.dumps(chat(stream=True)).encode()
    asked: list[tuple[str, str, bytes, dict[str, str], int]] = [
        ("POST", CHAT, whole, {}, 200),
        ("POST", CHAT, stream, {}, 200),
        ("POST", CHAT, whole, {}, 500),
        ("POST", CHAT, stream, {}, 200),
        ("POST", CHAT, b"{", {}, 400),
        ("POST", CHAT, b" " * 6000, {}, 413),
        ("GET", "/health", b"", {}, 200),
        ("GET", "/v1/models/unheard-of", b"", {}, 404),
        ("PUT", "/health", b"", {}, 405),
        ("GET", "/health", b"", {"Host": "evil.com"}, 403),
        ("POST", CHAT, b"", {"Expect": "100-continue", "Content-Length": "9999"}, 413),
    ]
    for method, path, body, more, status in asked:
        async with f.proxy.raw() as client:
            lines = {"Host": "localhost", "Content-Length": str(len(body)), **headers, **more}
            head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
            await client.send(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
            got, answered = await client.read_head()
        assert (path, got) == (path, status)
        assert answered["access-control-allow-origin"] == "http://localhost:3000"
        assert answered["access-control-expose-headers"] == "X-Request-Id, Server-Timing, Retry-After"
        assert answered["x-request-id"] == "my-id"


async def test_a_page_from_elsewhere_may_not_read(fault: StartFault) -> None:
    f = await fault(faults.ok)
    for origin in ("https://evil.com", "http://[::1", "null"):
        reply = await f.proxy.ask("GET", "/health", headers={"Origin": origin})
        assert reply.status == 200
        assert "Access-Control-Allow-Origin" not in reply.headers


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é", "a\tb", "ui"])
async def test_an_id_that_is_none_is_replaced(fault: StartFault, given: str) -> None:
    f = await fault(faults.ok)
    reply = await f.proxy.chat(headers={"X-Request-Id": given})
    assert len(reply.headers["X-Request-Id"]) == 32
    assert f.upstream.exchanges[0].headers["x-request-id"] == reply.headers["X-Request-Id"]


# Expect: 100-continue


async def expecting(client: RawClient, length: int, **headers: str) -> tuple[int, dict[str, str]]:
    await client.head("POST", CHAT, length, Content_Type=JSON, Expect="100-continue", **headers)
    return await client.read_head()


async def test_who_expects_100_is_told_to_go_on_once_the_key_is_good(fault: StartFault) -> None:
    f = await fault(faults.ok, api_keys=["good"])
    f.proxy.http.headers.update(KEY)
    body = json.dumps(chat()).encode()
    async with f.proxy.raw() as client:
        assert (await expecting(client, len(body), Authorization="Bearer good"))[0] == 100
        await client.send(body)
        status, headers = await client.read_head()
        assert (status, await client.read_body(headers)) == (200, faults.TEXT.body)
    assert "expect" not in f.upstream.exchanges[0].headers


@pytest.mark.parametrize(
    ("length", "headers", "status"),
    [(10, {}, 401), (10, {"Authorization": "Bearer bad"}, 401), (99_999, {"Authorization": "Bearer good"}, 413)],
)
async def test_who_expects_100_is_refused_before_the_body_comes(
    serve_proxy: Serve, length: int, headers: dict[str, str], status: int
) -> None:
    proxy = await serve_proxy(in_front_of("http://127.0.0.1:9", api_keys=["good"], max_body=5000))
    async with proxy.raw() as client:
        got, answered = await expecting(client, length, **headers)
        assert (got, answered["connection"]) == (status, "close")
        assert "error" in json.loads(await client.read_body(answered))


async def test_http_1_0_is_never_told_to_go_on(fault: StartFault) -> None:
    f = await fault(faults.ok)
    body = json.dumps(chat()).encode()
    async with f.proxy.raw() as client:
        await client.send(
            b"POST %b HTTP/1.0\r\nContent-Length: %d\r\nExpect: 100-continue\r\n" % (CHAT.encode(), len(body))
        )
        await client.send(b"Content-Type: application/json\r\n\r\n" + body)
        assert (await client.read_head())[0] == 200


# Old and odd HTTP


@pytest.mark.parametrize("host", [b"", b"Host: localhost\r\n"])
async def test_http_1_0_gets_whole_answers_and_streams(fault: StartFault, host: bytes) -> None:
    f = await fault(faults.ok, faults.ok)
    for stream, expected in ((False, faults.TEXT.body), (True, faults.CHAT.body)):
        body = json.dumps(chat(stream=stream)).encode()
        async with f.proxy.raw() as client:
            await client.send(b"POST %b HTTP/1.0\r\n%bContent-Length: %d\r\n" % (CHAT.encode(), host, len(body)))
            await client.send(b"Content-Type: application/json\r\n\r\n" + body)
            status, headers = await client.read_head()
            assert status == 200
            assert "transfer-encoding" not in headers
            assert await client.read_rest() == expected


async def test_http_1_0_learns_of_a_truncated_stream_by_a_reset(fault: StartFault) -> None:
    f = await fault(faults.truncated)
    body = json.dumps(chat(stream=True)).encode()
    async with f.proxy.raw() as client:
        await client.send(b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n" % (CHAT.encode(), len(body)))
        await client.send(b"Content-Type: application/json\r\n\r\n" + body)
        with pytest.raises(ConnectionResetError):
            await client.read_rest()


async def test_http_1_0_may_send_chunks(fault: StartFault) -> None:
    f = await fault(faults.ok)
    body = json.dumps(chat()).encode()
    async with f.proxy.raw() as client:
        await client.send(b"POST %b HTTP/1.0\r\nTransfer-Encoding: chunked\r\n" % CHAT.encode())
        await client.send(b"Content-Type: application/json\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        status, _ = await client.read_head()
        assert status == 200


async def test_a_header_line_of_10_kb_passes(fault: StartFault) -> None:
    f = await fault(faults.ok)
    reply = await f.proxy.chat(headers={"X-Long": "x" * 10_000})
    assert reply.status == 200
    assert f.upstream.exchanges[0].headers["x-long"] == "x" * 10_000


async def test_an_answers_header_line_of_10_kb_passes(fault: StartFault) -> None:
    f = await fault(faults.refuses(400, X_Long="x" * 10_000))
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat())
        assert (await client.read_head())[1]["x-long"] == "x" * 10_000


async def test_a_query_of_10_kb_passes(fault: StartFault) -> None:
    f = await fault(faults.ok)
    assert (await f.proxy.ask("GET", "/running?q=" + "x" * 10_000)).status == 200


@pytest.mark.parametrize(
    ("status", "head"),
    [
        (431, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n"),
        (431, b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (400, b"junk\r\n\r\n"),
        (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        (400, b"GET /health HTTP/1.1\r\nno colon\r\n\r\n"),
        (400, b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n"),
        (400, b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(500)) + b"\r\n"),
    ],
    ids=["long header", "long line", "junk", "TLS", "no colon", "length", "many headers"],
)
async def test_what_is_not_http_gets_an_error_object_and_one_line_in_the_log(
    serve_proxy: Serve, status: int, head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    proxy = await serve_proxy(in_front_of("http://127.0.0.1:9"))
    async with proxy.raw() as client:
        for sent, expected in ((b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 200), (head, status)):
            await client.send(sent)
            got, headers = await client.read_head()
            body = await client.read_body(headers)
            assert got == expected
        assert (headers["content-type"].partition(";")[0], headers["connection"]) == (JSON, "close")
        error = json.loads(body)["error"]
        assert (set(error), error["type"]) == ({"message", "type", "param", "code"}, "invalid_request_error")
        assert ("65536 bytes" if status == 431 else "read as HTTP") in error["message"]
        assert await client.read_rest() == b""
    await untouched(proxy)
    told = [record for record in caplog.records if record.name == "proxy.http" and record.levelname != "DEBUG"]
    assert all("\n" not in record.getMessage() and not record.exc_info for record in told)


async def test_two_requests_on_one_connection_are_answered_in_turn(fault: StartFault) -> None:
    f = await fault(faults.ok, faults.ok)
    async with f.proxy.raw() as client:
        await client.post(CHAT, chat())
        await client.post(CHAT, chat(stream=True))
        for expected in (faults.TEXT.body, faults.CHAT.body):
            status, headers = await client.read_head()
            assert (status, await client.read_body(headers)) == (200, expected)
