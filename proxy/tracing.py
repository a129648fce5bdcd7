"""OpenTelemetry: one span for a request, and inside it one for the wait in the queue and one for the upstream's work.

1. Without an endpoint in the configuration nothing of OpenTelemetry is imported and every call does nothing; a client's
   own `traceparent` then reaches the upstream like any other header.
2. With one, the client's `traceparent` is the parent of the request's span, and the upstream gets the span of its work.
3. Spans carry names, modes and numbers. Never a prompt, a key, or an error's message, which may quote either.
"""

import asyncio
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, Self

from proxy.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span, SpanKind, Tracer

Attributes = Mapping[str, str | int | float | bool]
_NONE: Attributes = MappingProxyType({})


@dataclass(frozen=True)
class TracingSettings:
    """`endpoint`: the OTLP collector's HTTP address up to and with /v1/traces; empty: off. `sample`: share of requests
    that begin a trace here; a client's decision, where it sent one, goes first."""

    endpoint: str = ""
    service_name: str = "llama-lease"
    sample: float = 1.0


class Step(Protocol):
    """A span that is open."""

    def set(self, attributes: Attributes) -> None:
        """Add facts, e.g. {"http.response.status_code": 200}."""

    def event(self, name: str) -> None:
        """Mark a moment, e.g. the first byte."""


class RequestTrace(Step, Protocol):
    """The span of one request."""

    def queue(self, attributes: Attributes = _NONE) -> AbstractContextManager[Step]:
        """Around the wait for the lease, and nothing else."""

    def upstream(
        self, headers_out: MutableMapping[str, str], attributes: Attributes = _NONE
    ) -> AbstractContextManager[Step]:
        """Around the exchange with the upstream; puts this span's `traceparent` into the headers that go there."""

    def speech(self, attributes: Attributes = _NONE) -> AbstractContextManager[Step]:
        """Around a synthesis in this process."""


class Tracing(Protocol):
    def request_span(
        self, headers: Mapping[str, str], name: str, attributes: Attributes = _NONE
    ) -> AbstractContextManager[RequestTrace]:
        """Around a whole request. `headers`: the client's; `name`: method and route, from the configuration's names."""

    async def close(self) -> None:
        """Send what is left and stop."""


def build_tracing(settings: TracingSettings) -> Tracing:
    """Raises ConfigError if an endpoint is configured and the `otel` extra is not installed."""
    if not settings.endpoint:
        return NoTracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"tracing.endpoint: OpenTelemetry is not installed ({error}); pip install 'llama-lease[otel]'",
            param="tracing.endpoint",
        ) from error
    return OpenTelemetryTracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.endpoint)), settings)


class NoTracing:
    """Does nothing, at the cost of nothing."""

    def request_span(
        self, headers: Mapping[str, str], name: str, attributes: Attributes = _NONE
    ) -> AbstractContextManager[RequestTrace]:
        return _NO_SPAN

    async def close(self) -> None:
        return None


class _NoSpan:
    """Every span of a request that is not traced, and the context manager of each."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def set(self, attributes: Attributes) -> None:
        pass

    def event(self, name: str) -> None:
        pass

    def queue(self, attributes: Attributes = _NONE) -> AbstractContextManager[Step]:
        return self

    def upstream(
        self, headers_out: MutableMapping[str, str], attributes: Attributes = _NONE
    ) -> AbstractContextManager[Step]:
        return self

    def speech(self, attributes: Attributes = _NONE) -> AbstractContextManager[Step]:
        return self


_NO_SPAN = _NoSpan()


class OpenTelemetryTracing:
    """Spans go to `processor`. The provider is this object's own: nothing is registered globally."""

    def __init__(self, processor: "SpanProcessor", settings: TracingSettings) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        self._provider = TracerProvider(
            resource=Resource.create({"service.name": settings.service_name}),
            sampler=ParentBasedTraceIdRatio(settings.sample),
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("llama-lease")

    @contextmanager
    def request_span(
        self, headers: Mapping[str, str], name: str, attributes: Attributes = _NONE
    ) -> Iterator[RequestTrace]:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(headers)
        with _open_span(self._tracer, name, SpanKind.SERVER, parent, attributes) as span:
            yield _RequestSpan(self._tracer, span)

    async def close(self) -> None:
        # The last spans are sent over the network, by blocking calls.
        await asyncio.to_thread(self._provider.shutdown)


class _SpanStep:
    def __init__(self, span: "Span") -> None:
        self._span = span

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str) -> None:
        self._span.add_event(name)


class _RequestSpan(_SpanStep):
    def __init__(self, tracer: "Tracer", span: "Span") -> None:
        from opentelemetry.trace import set_span_in_context

        super().__init__(span)
        self._tracer = tracer
        # Handed on by hand, not through the current context: the relay's tasks are others than the handler's.
        self._context = set_span_in_context(span)

    @contextmanager
    def queue(self, attributes: Attributes = _NONE) -> Iterator[Step]:
        from opentelemetry.trace import SpanKind

        with _open_span(self._tracer, "lease wait", SpanKind.INTERNAL, self._context, attributes) as span:
            yield _SpanStep(span)

    @contextmanager
    def upstream(self, headers_out: MutableMapping[str, str], attributes: Attributes = _NONE) -> Iterator[Step]:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        with _open_span(self._tracer, "upstream", SpanKind.CLIENT, self._context, attributes) as span:
            TraceContextTextMapPropagator().inject(headers_out, set_span_in_context(span))
            yield _SpanStep(span)

    @contextmanager
    def speech(self, attributes: Attributes = _NONE) -> Iterator[Step]:
        from opentelemetry.trace import SpanKind

        with _open_span(self._tracer, "speech", SpanKind.INTERNAL, self._context, attributes) as span:
            yield _SpanStep(span)


@contextmanager
def _open_span(
    tracer: "Tracer", name: str, kind: "SpanKind", parent: "Context", attributes: Attributes
) -> Iterator["Span"]:
    from opentelemetry.trace import Status, StatusCode

    span = tracer.start_span(name, context=parent, kind=kind, attributes=attributes)
    try:
        yield span
    except asyncio.CancelledError:
        span.set_attribute("cancelled", True)  # the client has gone: nobody's error
        raise
    except BaseException as error:
        span.set_attribute("error.type", type(error).__qualname__)
        span.set_status(Status(StatusCode.ERROR))
        raise
    finally:
        span.end()
