"""What a trace could reuse anywhere in its prompts: replayed with the index that serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvist.core.errors import ConfigError
from kvist.sim.contenders import NAMES, contender
from kvist.sim.formats import read_trace
from kvist.sim.spans import SpanResult, part_tokens, replay_spans, with_long_keys
from kvist.sim.synthetic import synthetic
from kvist.sim.traces import Request, Trace

RAGPULSE = Path(__file__).resolve().parents[4] / "shared" / "traces" / "ragpulse"


def unbounded(trace: Trace) -> SpanResult:
    trace = with_long_keys(trace)
    capacity = trace.unique_blocks
    return replay_spans(trace, contender("leaf-lru", trace, capacity), capacity)


@pytest.fixture(scope="module")
def rag() -> Trace:
    return synthetic("rag", requests=400, rate_per_s=1.0, seed=3)


def test_spans_come_near_the_ideal_where_prefixes_do_not(rag: Trace) -> None:
    found = unbounded(rag)
    assert rag.repeated_tokens_ratio is not None
    assert found.ideal_token_ratio == pytest.approx(rag.repeated_tokens_ratio)
    assert found.prefix_token_ratio < 0.6 * found.ideal_token_ratio
    assert found.span_token_ratio > 0.97 * found.ideal_token_ratio
    assert found.span_token_ratio < found.ideal_token_ratio + 0.001
    assert found.blocks_written == found.index_blocks + partial_blocks(rag)


def partial_blocks(trace: Trace) -> int:
    """Last blocks that are not whole: they are cached, but there is no row to index by."""
    return len({r.keys[-1] for r in trace.requests if r.input_tokens % trace.block_tokens})


@pytest.mark.parametrize("policy", NAMES)
def test_a_smaller_cache_finds_less_and_the_index_holds_no_more_than_it(
    rag: Trace, policy: str
) -> None:
    trace = with_long_keys(rag)
    capacity = trace.unique_blocks // 10
    found = replay_spans(trace, contender(policy, trace, capacity), capacity)
    assert found.index_blocks <= capacity
    assert 0.0 < found.prefix_token_ratio <= found.span_token_ratio
    assert found.span_token_ratio < unbounded(rag).span_token_ratio


def test_the_same_trace_gives_the_same_figures(rag: Trace) -> None:
    one, two = unbounded(rag), unbounded(rag)
    assert one == two


def test_passages_in_another_order_are_spans_and_not_prefixes() -> None:
    """Two prompts of the same three passages: only the order differs."""
    parts = [(1, 200), (2, 300), (3, 250)]
    prompts = [parts, [parts[2], parts[0], parts[1]]]
    requests = [
        Request(
            time_s=float(n),
            keys=tuple(b"%d.%d" % (n, i) for i in range(12)),
            input_tokens=750,
            parts=tuple(prompt),
        )
        for n, prompt in enumerate(prompts)
    ]
    found = unbounded(Trace.of("two", 64, requests))
    assert found.prefix_token_ratio == 0.0
    assert found.ideal_token_ratio == 0.5
    # Of 750 tokens 704 are in whole blocks.
    assert found.span_token_ratio == pytest.approx(704 / 1500)
    assert found.spans == 2  # passages 1 and 2 stand behind each other in both


def test_a_trace_without_parts_is_refused() -> None:
    with pytest.raises(ConfigError, match="do not say"):
        with_long_keys(Trace.of("plain", 64, [Request(0.0, (b"k",), 64)]))


def test_parts_have_tokens_of_their_own() -> None:
    assert part_tokens(1, 50).tolist() == part_tokens(1, 60).tolist()[:50]
    assert not set(part_tokens(1, 50).tolist()) >= set(part_tokens(2, 50).tolist())
    assert part_tokens(7, 0).tolist() == []
    assert part_tokens(7, 1000).max() < 100_000


@pytest.mark.slow
@pytest.mark.skipif(not RAGPULSE.exists(), reason="the public traces are not here")
def test_spans_reach_most_of_what_repeats_on_a_real_rag_service() -> None:
    found = unbounded(read_trace(RAGPULSE / "0_trace.jsonl"))
    assert found.prefix_token_ratio == pytest.approx(0.31, abs=0.01)
    assert found.ideal_token_ratio == pytest.approx(0.72, abs=0.005)
    assert found.span_token_ratio >= 0.68
