"""Counts requests for Prometheus, and logs one line of JSON for each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric as PromMetric

from kvist.gateway.record import Record
from kvist.metrics import BY_NAME

requests_log = logging.getLogger("kvist.gateway.requests")
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOOK_S = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)


class _Measured:
    """Values that others keep; a label's value follows its metric's name after a dot."""

    def __init__(self, measures: Callable[[], Mapping[str, float]]) -> None:
        self._measures = measures

    def describe(self) -> Iterable[PromMetric]:
        """Nothing: registering asks for no values."""
        return ()

    def collect(self) -> Iterator[PromMetric]:
        """The values now."""
        families: dict[str, PromMetric] = {}
        for sample, value in self._measures().items():
            name, dot, label = sample.partition(".")
            metric = BY_NAME[name]
            if name not in families:
                kind = metric.kind.value
                families[name] = PromMetric(name.removesuffix("_total"), metric.description, kind)
            families[name].add_sample(name, {metric.labels[0]: label} if dot else {}, value)
        yield from families.values()


class Telemetry:
    """The samples of one gateway."""

    def __init__(
        self,
        in_flight: Callable[[], int],
        booked: Callable[[], int],
        measures: Callable[[], Mapping[str, float]],
    ) -> None:
        """All are asked when the page is; `measures` gives values by the names of metrics."""
        self._registry = CollectorRegistry()
        self._registry.register(_Measured(measures))
        self._requests = self._counter("kvist_gateway_requests_total")
        self._refused = self._counter("kvist_gateway_refused_total")
        self._prompt = self._counter("kvist_gateway_prompt_tokens_total")
        self._output = self._counter("kvist_gateway_output_tokens_total")
        self._hits = self._counter("kvist_gateway_hit_tokens_total")
        self._broke = self._counter("kvist_gateway_broken_attempts_total")
        self._resumed = self._counter("kvist_gateway_resumed_total")
        self._splits = self._counter("kvist_gateway_splits_total")
        self._prefills = self._counter("kvist_gateway_prefills_total")
        self._ttft = self._histogram("kvist_gateway_ttft_seconds", _TTFT_S)
        self._error = self._histogram("kvist_gateway_ttft_error_seconds", _TTFT_S)
        self._took = self._histogram("kvist_gateway_request_seconds", _TOOK_S)
        for name, value in (
            ("kvist_gateway_requests_in_flight", in_flight),
            ("kvist_gateway_bookings", booked),
        ):
            gauge = Gauge(name, BY_NAME[name].description, registry=self._registry)
            gauge.set_function(value)

    def done(self, record: Record) -> None:
        """A request is over."""
        self._requests.labels(record.endpoint, record.outcome).inc()
        if record.refused:
            self._refused.labels(record.refused).inc()
        self._prompt.labels(record.tenant).inc(record.prompt_tokens)
        self._output.labels(record.tenant).inc(record.output_tokens)
        self._hits.labels(record.tenant).inc(record.hit_tokens)
        for replica, _ in zip(record.replicas, record.broke, strict=False):
            self._broke.labels(replica).inc()
        for way in record.ways:
            self._resumed.labels(way).inc()
        for split in record.splits:
            self._splits.labels(*split.split(": ")).inc()
        for replica, ended in zip(record.prefills, record.prefilled, strict=True):
            self._prefills.labels(ended).inc()
            if ended == "lost":
                self._broke.labels(replica).inc()
        self._took.labels(record.endpoint).observe(record.took_s)
        if record.ttft_s is not None and record.streamed:
            self._ttft.labels(record.endpoint).observe(record.ttft_s)
            if record.predicted_ttft_s:
                self._error.labels(record.endpoint).observe(
                    abs(record.ttft_s - record.predicted_ttft_s)
                )
        if requests_log.isEnabledFor(logging.INFO):
            requests_log.info("%s", msgspec.json.encode(record).decode())

    def page(self) -> bytes:
        """The page for Prometheus."""
        return bytes(generate_latest(self._registry))

    def _counter(self, name: str) -> Counter:
        metric = BY_NAME[name]
        return Counter(name, metric.description, metric.labels, registry=self._registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        metric = BY_NAME[name]
        return Histogram(
            name, metric.description, metric.labels, registry=self._registry, buckets=buckets
        )
