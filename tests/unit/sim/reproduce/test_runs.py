"""The runs: hit ratios counted by hand, the testbed's cluster, and what the public traces give."""

import dataclasses
from pathlib import Path

import pytest

from kvist.sim.des.cluster import simulate
from kvist.sim.des.routing_spec import RouterKind
from kvist.sim.des.spec import FirstToken, LinkSpec, Prefilling, Role, Scope, Slo
from kvist.sim.formats import read_trace
from kvist.sim.reproduce import published
from kvist.sim.reproduce.cluster import (
    DECODE,
    EFFICIENCY,
    ClusterRun,
    System,
    cluster_spec,
    first_tokens_only,
    measure,
    prefill_coefficients,
)
from kvist.sim.reproduce.hits import HitRun, token_hit_ratio
from kvist.sim.reproduce.runner import trace_path
from kvist.sim.traces import Request, Trace

BLOCK_TOKENS = 512


def _trace(*chains: str) -> Trace:
    requests = [
        Request(
            time_s=float(n),
            keys=tuple(word[: i + 1].encode() for i in range(len(word))),
            input_tokens=BLOCK_TOKENS * len(word),
            output_tokens=5,
        )
        for n, word in enumerate(chains)
    ]
    return Trace.of("words", BLOCK_TOKENS, requests)


def test_an_endless_pool_holds_all_that_came_before() -> None:
    trace = _trace("abc", "abd", "abc")
    assert token_hit_ratio(HitRun("words", "leaf-lru", None), trace) == pytest.approx(5 / 9)


def test_a_pool_is_counted_in_tokens() -> None:
    trace = _trace("ab", "cd", "ab")
    assert token_hit_ratio(HitRun("words", "leaf-lru", 4 * BLOCK_TOKENS), trace) > 0
    assert token_hit_ratio(HitRun("words", "leaf-lru", 2 * BLOCK_TOKENS), trace) == 0


def test_efficiency_scales_prefill_and_decode_once() -> None:
    base, slow = (cluster_spec(ClusterRun("t", System.VLLM, efficiency=s)) for s in (1.0, 2.0))
    assert base.prefill() == prefill_coefficients(1.0)
    assert slow.prefill().prefill_s(8192, 0) == pytest.approx(2 * base.prefill().prefill_s(8192, 0))
    assert base.decode() == DECODE
    assert slow.decode().decode_s(8, 9999) == pytest.approx(2 * DECODE.decode_s(8, 9999))


def test_mooncake_is_apart_with_a_pool_and_vllm_is_mixed_without() -> None:
    mooncake = cluster_spec(ClusterRun("t", System.MOONCAKE, prefill_nodes=3, decode_nodes=5))
    assert [mooncake.roles.count(role) for role in (Role.PREFILL, Role.DECODE)] == [3, 5]
    assert mooncake.store.dram.capacity_bytes == published.POOL_TOKENS * 320 * 1024
    vllm = cluster_spec(ClusterRun("t", System.VLLM, prefill_nodes=16, decode_nodes=0))
    assert vllm.roles == (Role.MIXED,) * 16
    assert vllm.engine.prefilling is Prefilling.NON_INTERRUPTIBLE
    assert not vllm.engine.prefix_cache
    assert vllm.store.dram.capacity_bytes == 0


def test_with_its_prefix_cache_vllm_computes_less_and_with_a_pool_still_less() -> None:
    trace = _trace(*(f"system{user}" * 3 + turn for turn in "xyz" for user in "abcdefgh"))
    spent = [
        measure(ClusterRun("t", system, prefill_nodes=4, decode_nodes=nodes), trace)
        for system, nodes in ((System.VLLM, 0), (System.VLLM_PREFIX, 0), (System.MOONCAKE, 4))
    ]
    assert spent[0].prefill_device_s > spent[1].prefill_device_s > 0
    assert spent[0].prefill_device_s > spent[2].prefill_device_s > 0
    assert spent[0].hit_ratio == 0


def test_a_run_without_decode_nodes_ends_at_the_first_token() -> None:
    trace = first_tokens_only(_trace("abc", "abd"))
    assert [request.output_tokens for request in trace.requests] == [1, 1]
    report = measure(ClusterRun("t", System.MOONCAKE, prefill_nodes=2, decode_nodes=0), trace)
    assert report.finished == 2
    assert all(served.tbt_s == 0 for served in report.served)


def test_the_way_of_the_kv_is_part_of_ttft_and_of_no_gap() -> None:
    trace = _trace("abcdefgh")
    spec = cluster_spec(ClusterRun("t", System.MOONCAKE, prefill_nodes=1, decode_nodes=1))
    slow = dataclasses.replace(spec, links=LinkSpec(nic_bytes_per_s=1e8))
    at_prefill = dataclasses.replace(
        slow, engine=dataclasses.replace(slow.engine, first_token=FirstToken.PREFILL)
    )
    counted, gap = (simulate(s, trace, seed=0).served[0] for s in (slow, at_prefill))
    way_s = counted.ttft_s - gap.ttft_s
    assert way_s > 1
    assert gap.tbt_s == pytest.approx(counted.tbt_s + way_s)
    assert counted.end_s == gap.end_s


@pytest.mark.parametrize(
    ("name", "low", "high"), [("conversation", 0.33, 0.45), ("synthetic", 0.42, 0.52)]
)
def test_fig_9_at_three_million_tokens(
    public_traces: Path, name: str, low: float, high: float
) -> None:
    trace = read_trace(trace_path(public_traces, name))
    ideal = token_hit_ratio(HitRun(name, "leaf-lru", None), trace)
    small = token_hit_ratio(HitRun(name, "leaf-lru", published.POOL_TOKENS), trace)
    large = token_hit_ratio(HitRun(name, "leaf-lru", published.LARGE_POOL_TOKENS), trace)
    assert low <= small / ideal <= high
    assert large / ideal > 0.97


@pytest.mark.slow
def test_gains_over_vllm_are_near_the_papers(public_traces: Path) -> None:
    talk = published.CONVERSATION
    trace = read_trace(trace_path(public_traces, talk))
    mooncake = measure(ClusterRun(talk, System.MOONCAKE), trace)
    vllm = measure(ClusterRun(talk, System.VLLM, prefill_nodes=16, decode_nodes=0), trace)
    for limit_s, paper in zip(published.TBT_LIMITS_S, published.CAPACITY_GAIN[talk], strict=True):
        slo = Slo(published.TTFT_LIMIT_S, limit_s)
        gain = mooncake.effective(slo) / vllm.effective(slo) - 1
        assert gain == pytest.approx(paper, rel=0.15), f"s = {EFFICIENCY}, {limit_s} s"


@pytest.mark.slow
def test_scheduling_ranks_as_in_fig_5(public_traces: Path) -> None:
    talk = published.CONVERSATION
    trace = read_trace(trace_path(public_traces, talk))
    means = [
        measure(ClusterRun(talk, System.MOONCAKE, router=router, scope=scope), trace).ttft_s.mean
        for router, scope in (
            (RouterKind.RANDOM, Scope.LOCAL),
            (RouterKind.LEAST_LOADED, Scope.LOCAL),
            (RouterKind.CACHE_AWARE_LOCAL, Scope.LOCAL),
            (RouterKind.CACHE_AWARE, Scope.PEERS),
        )
    ]
    assert means == sorted(means, reverse=True)
