"""Each request is counted, logged and traced, however it ended."""

from __future__ import annotations

import json
import logging
import re

import pytest
from gateway_thread import HASTY, alone, eventually, serving, stats
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvist.gateway.limits import TenantLimits
from kvist.gateway.otel import OtelTracer
from kvist.gateway.record import Record
from kvist.gateway.settings import Settings
from kvist.metrics import BY_NAME
from kvist.node.http.tokens import Tokens
from kvist.testing.stub_engine import Pace, StubEngine

COMPLETIONS = "/v1/completions"
ASKED = {"model": "stub", "prompt": "told", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_requests_are_counted_by_how_they_ended(engine: StubEngine) -> None:
    with serving(engine) as gateway:
        gateway.stream(COMPLETIONS, ASKED)
        gateway.ask(COMPLETIONS, ASKED)
        gateway.ask(COMPLETIONS, b"{")
        gateway.ask(COMPLETIONS, ASKED | {"model": "none"})
        eventually(lambda: gateway.samples()["kvist_gateway_requests_in_flight"] == 0)
        found = gateway.samples()
        name = 'kvist_gateway_requests_total{endpoint="/v1/completions",outcome="%s"}'
        assert (found[name % "ok"], found[name % "invalid"]) == (2, 2)
        assert found['kvist_gateway_output_tokens_total{tenant=""}'] == 10
        assert found['kvist_gateway_ttft_seconds_count{endpoint="/v1/completions"}'] == 1
        assert found["kvist_gateway_bookings"] == 0
        names = set(re.findall(r"# TYPE (\w+) (?!gauge)", gateway.ask("/metrics")[1]))
        declared = {n for n in names if not n.endswith("_created")}
        assert {f"{n}_total" if f"{n}_total" in BY_NAME else n for n in declared} <= set(BY_NAME)


def test_refusals_are_counted_by_why(caplog: pytest.LogCaptureFixture) -> None:
    """A tenant's limit, engines that are too slow and one that is away want different remedies."""
    limits = TenantLimits(requests_per_min=2)
    with (
        caplog.at_level(logging.INFO, "kvist.gateway.requests"),
        StubEngine() as engine,
        serving(engine, limits=limits) as gateway,
    ):
        gateway.ask(COMPLETIONS, ASKED, headers={"X-Deadline-S": "1e-9"})
        gateway.ask(COMPLETIONS, b"{")
        engine.kill()
        gateway.ask(COMPLETIONS, ASKED)
        gateway.ask(COMPLETIONS, ASKED)
        found = gateway.samples()
    said = [r.getMessage() for r in caplog.records if r.name == "kvist.gateway.requests"]
    lines = [json.loads(line) for line in said]
    assert [line["refused"] for line in lines][:2] == ["deadline", ""]
    reasons = {line["refused"] for line in lines[2:]}
    assert reasons <= {"replicas", "no-replica", "limit"}
    assert "limit" in reasons
    for reason in ("deadline", *reasons):
        assert found[f'kvist_gateway_refused_total{{reason="{reason}"}}'] == 1


def test_broken_attempts_are_counted_with_the_way_on(engine: StubEngine) -> None:
    with StubEngine(Pace(token_s=60.0)) as stuck:
        settings = Settings(timeouts=type(HASTY)(token_s=0.2))
        with serving(stuck, engine, settings=settings) as gateway:
            assert gateway.stream(COMPLETIONS, ASKED).text == alone(engine, COMPLETIONS, ASKED).text
            eventually(lambda: gateway.samples()["kvist_gateway_requests_in_flight"] == 0)
            found = gateway.samples()
            assert found[f'kvist_gateway_broken_attempts_total{{replica="{stuck.url}"}}'] == 1
            ways = {n: v for n, v in found.items() if n.startswith("kvist_gateway_resumed_total")}
            assert sum(ways.values()) == 1


def test_line_of_the_log_says_all_and_nothing_of_the_text(
    engine: StubEngine, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = Tokens("operator-0123456789", {"alice": "alice-0123456789abc"}, section="$.gateway")
    headers = {"Authorization": "Bearer alice-0123456789abc", "X-Request-Id": "r1"}
    with (
        caplog.at_level(logging.INFO, "kvist.gateway.requests"),
        serving(engine, tokens=tokens) as gateway,
    ):
        gateway.ask(COMPLETIONS, ASKED | {"prompt": "a secret"}, headers=headers)
        eventually(lambda: bool(caplog.records))
    (line,) = [r.getMessage() for r in caplog.records if r.name == "kvist.gateway.requests"]
    record = json.loads(line)
    assert "secret" not in line
    assert (
        record.items()
        >= {
            "request": "r1",
            "tenant": "alice",
            "model": "stub",
            "outcome": "ok",
            "status": 200,
            "prompt_tokens": 8,
            "output_tokens": 5,
            "replicas": [engine.url],
        }.items()
    )
    (reason,) = record["reasons"]
    assert reason.startswith("round-robin: queue 0.000 s, serve ")
    assert record["ttft_s"] > 0
    assert record["predicted_ttft_s"] > 0
    assert record["waited_s"] == 0


def test_spans_stand_below_the_clients_and_engines_go_on(engine: StubEngine) -> None:
    exporter = InMemorySpanExporter()
    with serving(engine, tracer=OtelTracer(exporter)) as gateway:
        sent = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        gateway.ask(COMPLETIONS, ASKED, headers=sent)
        seen = stats(engine)["last_headers"]["traceparent"]
    (span,) = exporter.get_finished_spans()
    assert isinstance(span, ReadableSpan)
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == SPAN
    assert seen == f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert span.attributes is not None
    assert span.attributes["kvist.outcome"] == "ok"
    assert span.attributes["kvist.output_tokens"] == 5


def test_span_says_what_was_expected_in_which_tier() -> None:
    exporter = InMemorySpanExporter()
    tracer = OtelTracer(exporter)
    record = Record(request="r", endpoint=COMPLETIONS, hit_tiers={"hbm": 32, "ssd": 16})
    with tracer.request(record, {}, {}):
        pass
    tracer.close()
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["kvist.hit_tiers.hbm"] == 32
    assert span.attributes["kvist.hit_tiers.ssd"] == 16
