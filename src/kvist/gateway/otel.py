"""One OpenTelemetry span for each request, which engines continue by `traceparent`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

import msgspec
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvist.gateway.record import Record

_SERVICE = "kvist-gateway"
_PREFIX = "kvist."


class OtelTracer:
    """Sends spans to a collector, in batches of a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": _SERVICE}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvist")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> OtelTracer:
        """Spans go to the URL `endpoint`, by OTLP over HTTP."""
        return cls(OTLPSpanExporter(endpoint))

    @contextmanager
    def request(
        self, record: Record, client: Mapping[str, str], engine: MutableMapping[str, str]
    ) -> Iterator[None]:
        """See `Tracer.request`."""
        names = {name.lower(): value for name, value in client.items()}
        span = self._tracer.start_span(
            record.endpoint, self._propagator.extract(names), kind=SpanKind.SERVER
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        engine.update(carrier)
        try:
            yield
        finally:
            for name, value in msgspec.to_builtins(record).items():
                if isinstance(value, str | int | float | list):
                    span.set_attribute(_PREFIX + name, value)
            for tier, tokens in record.hit_tiers.items():
                span.set_attribute(f"{_PREFIX}hit_tiers.{tier}", tokens)
            if record.outcome == "failed":
                span.set_status(StatusCode.ERROR, record.fault)
            span.end()

    def close(self) -> None:
        """Sends what was not sent yet."""
        self._provider.shutdown()
