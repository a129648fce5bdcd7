import asyncio
import subprocess
import sys

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from multidict import CIMultiDict
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from proxy.errors import UpstreamError
from proxy.tracing import NoTracing, OpenTelemetryTracing, TracingSettings, build_tracing

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT = CIMultiDict({"Traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"})


class Traced:
    def __init__(self, settings: TracingSettings | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = OpenTelemetryTracing(SimpleSpanProcessor(self.exporter), settings or TracingSettings())

    def span(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.exporter.get_finished_spans() if span.name == name]
        return span


@pytest.fixture
def traced() -> Traced:
    return Traced()


def test_the_wait_and_the_upstream_are_spans_of_their_own_in_the_requests_span(traced: Traced) -> None:
    with traced.tracing.request_span({}, "POST /v1/chat/completions") as request:
        with request.queue({"lease.name": "gpu0", "lease.mode": "read"}):
            pass
        with request.upstream({}, {"upstream": "swapper"}) as step:
            step.event("first byte")
            step.set({"http.response.status_code": 200})
    whole, wait, work = (traced.span(name) for name in ("POST /v1/chat/completions", "lease wait", "upstream"))
    assert [span.kind for span in (whole, wait, work)] == [SpanKind.SERVER, SpanKind.INTERNAL, SpanKind.CLIENT]
    assert wait.parent == work.parent == whole.context
    assert wait.attributes == {"lease.name": "gpu0", "lease.mode": "read"}
    assert work.attributes == {"upstream": "swapper", "http.response.status_code": 200}
    assert [event.name for event in work.events] == ["first byte"]


def test_traceparent_is_taken_from_the_client_and_passed_on_with_the_upstreams_span(traced: Traced) -> None:
    headers = CIMultiDict(CLIENT)
    with traced.tracing.request_span(CLIENT, "POST /x") as request, request.upstream(headers):
        pass
    work = traced.span("upstream")
    assert headers.getall("traceparent") == [f"00-{TRACE_ID}-{work.context.span_id:016x}-01"]
    whole = traced.span("POST /x")
    assert whole.parent is not None
    assert f"{whole.parent.span_id:016x}" == "b7ad6b7169203331"


def test_a_request_that_brings_no_trace_begins_one(traced: Traced) -> None:
    headers: dict[str, str] = {}
    with traced.tracing.request_span({}, "POST /x") as request, request.upstream(headers):
        pass
    assert traced.span("POST /x").parent is None
    assert headers["traceparent"].startswith(f"00-{traced.span('POST /x').context.trace_id:032x}-")


def test_the_clients_decision_goes_before_our_own_share() -> None:
    traced = Traced(TracingSettings(sample=0.0))
    with traced.tracing.request_span({}, "not sampled"):
        pass
    with traced.tracing.request_span(CLIENT, "the client samples"):
        pass
    assert [span.name for span in traced.exporter.get_finished_spans()] == ["the client samples"]


def test_a_failed_step_is_an_error_and_does_not_quote_the_message(traced: Traced) -> None:
    with pytest.raises(UpstreamError), traced.tracing.request_span({}, "POST /x") as request, request.upstream({}):
        raise UpstreamError("the prompt was: secret")
    work = traced.span("upstream")
    assert work.status.status_code is StatusCode.ERROR
    assert work.attributes == {"error.type": "UpstreamError"}
    assert "secret" not in work.to_json()


def test_a_client_that_goes_away_is_no_error(traced: Traced) -> None:
    with pytest.raises(asyncio.CancelledError), traced.tracing.request_span({}, "POST /x") as request, request.queue():
        raise asyncio.CancelledError
    wait = traced.span("lease wait")
    assert wait.status.status_code is StatusCode.UNSET
    assert wait.attributes == {"cancelled": True}


def test_speech_in_the_process_is_a_span(traced: Traced) -> None:
    with traced.tracing.request_span({}, "POST /x") as request, request.speech({"backend": "hibari"}):
        pass
    assert traced.span("speech").parent == traced.span("POST /x").context


async def test_close_flushes_and_stops(traced: Traced) -> None:
    with traced.tracing.request_span({}, "last"):
        pass
    await traced.tracing.close()
    assert traced.span("last")


async def test_spans_are_sent_to_the_configured_collector() -> None:
    sent: list[bytes] = []

    async def collect(request: web.Request) -> web.Response:
        sent.append(await request.read())
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    async with TestServer(app) as collector:
        tracing = build_tracing(TracingSettings(endpoint=str(collector.make_url("/v1/traces")), service_name="our-gpu"))
        with tracing.request_span({}, "POST /v1/chat/completions") as request, request.queue():
            pass
        await tracing.close()
    assert all(name in sent[0] for name in (b"our-gpu", b"POST /v1/chat/completions", b"lease wait"))


async def test_without_an_endpoint_every_call_does_nothing_and_headers_stay() -> None:
    tracing = build_tracing(TracingSettings())
    headers = dict(CLIENT)
    assert isinstance(tracing, NoTracing)
    with tracing.request_span(CLIENT, "POST /x") as request:
        with request.queue() as wait:
            wait.event("x")
        with request.upstream(headers) as work:
            work.set({"a": 1})
        with request.speech():
            request.set({"a": 1})
    await tracing.close()
    assert headers == dict(CLIENT)


def test_without_an_endpoint_opentelemetry_is_not_imported() -> None:
    program = (
        "import sys\n"
        "from proxy.tracing import TracingSettings, build_tracing\n"
        "with build_tracing(TracingSettings()).request_span({}, 'x') as request, request.queue(): pass\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_endpoint_without_the_extra_is_a_configuration_error_that_says_what_to_install() -> None:
    program = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from proxy.errors import ConfigError\n"
        "from proxy.tracing import TracingSettings, build_tracing\n"
        "try: build_tracing(TracingSettings(endpoint='http://127.0.0.1:4318/v1/traces'))\n"
        "except ConfigError as error: print(error)\n"
    )
    told = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert told.startswith("tracing.endpoint: ")
    assert "pip install 'llama-lease[otel]'" in told
