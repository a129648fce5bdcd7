"""What the running server tells about its requests: in its log, on its metrics page, in its traces."""

import logging
from pathlib import Path

import aiohttp
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from proxy.logs import JsonFormatter, TextFormatter
from proxy.tracing import OpenTelemetryTracing, TracingSettings
from tests.fronted import until
from tests.proxy.observed import KEY, observed

PROMPT, SPOKEN = "the-secret-prompt", "the-secret-speech"


async def test_nothing_private_is_logged_counted_or_traced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    spans = InMemorySpanExporter()
    async with observed(tmp_path) as server:
        server.runtime.tracing = OpenTelemetryTracing(SimpleSpanProcessor(spans), TracingSettings())
        assert (await server.chat(content=PROMPT)).status == 200
        with pytest.raises(aiohttp.ClientError):  # the answer is cut; the error is logged
            await server.chat("broken", PROMPT)
        assert (await server.chat("no-such-model", PROMPT)).status == 404
        assert (await server.chat(content=PROMPT, Authorization=f"Bearer wrong-{KEY}")).status == 401
        async with server.client.post("/v1/chat/completions", data=f'{{"model": "qwen", "x": "{PROMPT}') as response:
            assert response.status == 400
        assert (await server.speak(SPOKEN)).status == 200
        server.speech.fail_at = {server.speech.started + 1}
        with pytest.raises(aiohttp.ClientError):
            await server.speak(SPOKEN)
        page = server.runtime.metrics.render()[0].decode()

    assert any(record.name == "proxy.ticketlog" for record in caplog.records)
    told = [page, *(span.to_json() for span in spans.get_finished_spans())]
    for formatter in (TextFormatter(), JsonFormatter()):
        told += [formatter.format(record) for record in caplog.records]
    for secret in (PROMPT, SPOKEN, KEY):
        assert [line for line in told if secret in line] == []


async def test_a_tickets_line_counts_the_bytes_of_its_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "proxy.ticketlog")
    async with observed(tmp_path) as server:
        fields = {"model": "qwen", "messages": [{"role": "user", "content": "hello"}]}
        async with server.client.post("/v1/chat/completions", json=fields) as response:
            chat = await response.read()
        fields = {"model": "tts", "input": "Hello.", "response_format": "wav"}
        async with server.client.post("/v1/audio/speech", json=fields) as response:
            audio = await response.read()
    lines = [record.fields for record in caplog.records if record.name == "proxy.ticketlog"]  # type: ignore[attr-defined]
    assert [(line["model"], line["bytes"], line["outcome"]) for line in lines] == [
        ("qwen", len(chat), "done"),
        ("tts", len(audio), "done"),
    ]


async def test_and_the_bytes_of_a_websockets_messages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "proxy.ticketlog")
    async with observed(tmp_path) as server:
        async with server.client.ws_connect("/upstream/qwen/ws") as socket:
            await socket.send_str("größer")
            said = (await socket.receive()).data
            await socket.send_bytes(b"12345")
            assert (await socket.receive()).data == b"12345"
        await until(lambda: server.runtime.leases["gpu0"].idle)
    [line] = [record.fields for record in caplog.records if record.name == "proxy.ticketlog"]  # type: ignore[attr-defined]
    assert line["bytes"] == len(said.encode()) + 5


async def test_the_upstream_gets_the_trace_and_the_span_of_its_own_work(tmp_path: Path) -> None:
    spans = InMemorySpanExporter()
    async with observed(tmp_path) as server:
        server.runtime.tracing = OpenTelemetryTracing(SimpleSpanProcessor(spans), TracingSettings())
        trace = "0af7651916cd43dd8448eb211c80319c"
        await server.chat(traceparent=f"00-{trace}-b7ad6b7169203331-01")
        received = server.swapper.requests[-1].headers
    by_name = {span.name: span for span in spans.get_finished_spans()}
    assert {"POST /v1/chat/completions", "lease wait", "upstream"} <= by_name.keys()
    span = by_name["upstream"].context
    assert received["traceparent"] == f"00-{trace}-{span.span_id:016x}-01"


async def test_without_tracing_the_clients_traceparent_reaches_the_upstream_unchanged(tmp_path: Path) -> None:
    sent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with observed(tmp_path) as server:
        await server.chat(traceparent=sent)
        assert server.swapper.requests[-1].headers["traceparent"] == sent
