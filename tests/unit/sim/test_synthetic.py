"""Synthetic traffic has the statistics it is made from, and is the same for the same seed."""

from __future__ import annotations

import pytest

from kvist.core.errors import ConfigError
from kvist.core.hints import Finish
from kvist.core.keys import Key
from kvist.sim.advise.traffic import ideal
from kvist.sim.synthetic import KINDS, synthetic
from kvist.sim.traces import Trace


def _ideal_ratio(trace: Trace) -> float:
    hits = ideal(trace.requests, trace.block_tokens).hit_tokens
    return sum(hits) / sum(request.input_tokens for request in trace.requests)


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_gives_the_same_trace_and_another_seed_another(kind: str) -> None:
    first, again = synthetic(kind, 300, 2.0, 1), synthetic(kind, 300, 2.0, 1)
    assert first == again
    assert first != synthetic(kind, 300, 2.0, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_and_rate_are_those_asked_for(kind: str) -> None:
    trace = synthetic(kind, 1_000, 2.0, 0)
    assert len(trace.requests) == 1_000
    span_s = trace.requests[-1].time_s - trace.requests[0].time_s
    assert 1_000 / span_s == pytest.approx(2.0, rel=0.15)
    times = [request.time_s for request in trace.requests]
    assert times == sorted(times)
    assert times[0] >= 0


@pytest.mark.parametrize("kind", KINDS)
def test_keys_name_prefixes_and_their_number_explains_the_length(kind: str) -> None:
    parents: dict[Key, Key | None] = {}
    trace = synthetic(kind, 500, 2.0, 3)
    for request in trace.requests:
        assert len(request.keys) == -(-request.input_tokens // trace.block_tokens)
        for i, key in enumerate(request.keys):
            parent = request.keys[i - 1] if i else None
            assert parents.setdefault(key, parent) == parent


def test_chat_continues_minutes_later_and_repeats_a_third() -> None:
    trace = synthetic("chat", 6_000, 3.4, 0)
    assert 0.30 < _ideal_ratio(trace) < 0.48
    inputs = sorted(request.input_tokens for request in trace.requests)
    assert 9_000 < sum(inputs) / len(inputs) < 15_000
    assert 5_000 < inputs[len(inputs) // 2] < 9_000
    last: dict[str, float] = {}
    gaps = []
    for request in trace.requests:
        if request.session in last:
            gaps.append(request.time_s - last[request.session])
        last[request.session] = request.time_s
    assert 90 < sorted(gaps)[len(gaps) // 2] < 300


def test_agents_repeat_more_than_95_percent_and_tools_take_seconds() -> None:
    trace = synthetic("agent", 5_000, 1.2, 0)
    assert _ideal_ratio(trace) > 0.95
    last: dict[str, tuple[float, Finish]] = {}
    gaps = []
    for request in trace.requests:
        before = last.get(request.session)
        if before is not None and before[1] is Finish.TOOL_USE is request.finish:
            gaps.append(request.time_s - before[0])
        last[request.session] = (request.time_s, request.finish)
    assert 12 < sorted(gaps)[len(gaps) // 2] < 30
    assert {request.finish for request in trace.requests} >= {
        Finish.TOOL_USE,
        Finish.END_TURN,
        Finish.SUB_AGENT,
    }


def test_rag_repeats_elsewhere_what_it_does_not_as_a_prefix() -> None:
    trace = synthetic("rag", 5_000, 1.0, 0)
    assert _ideal_ratio(trace) == pytest.approx(0.31, abs=0.02)
    assert trace.repeated_tokens_ratio == pytest.approx(0.72, abs=0.02)


def test_one_shot_lengths_are_azures_and_nothing_repeats() -> None:
    trace = synthetic("oneshot", 6_000, 2.5, 0)
    assert trace.unique_blocks == trace.accesses_blocks
    inputs = sorted(request.input_tokens for request in trace.requests)
    assert sum(inputs) / len(inputs) == pytest.approx(2_048, rel=0.1)
    assert inputs[len(inputs) // 2] == pytest.approx(1_469, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "requests", "rate", "named"),
    [
        ("chats", 10, 1.0, "--synthetic"),
        ("chat", 0, 1.0, "--requests"),
        ("chat", 10, 0.0, "--rate"),
        ("chat", 10, float("nan"), "--rate"),
    ],
)
def test_bad_wishes_are_refused_by_name(kind: str, requests: int, rate: float, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        synthetic(kind, requests, rate, 0)
