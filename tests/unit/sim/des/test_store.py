"""Tiers, loads and links together: what is loaded, from where, and how long it takes."""

from __future__ import annotations

import dataclasses

import pytest
from small_cluster import BLOCK_BYTES, BLOCK_TOKENS, PREFILL, cluster, engine, request, store, trace

from kvist.core.errors import ConfigError
from kvist.cost.plan_load import Overlap, Reason
from kvist.sim.des.cluster import simulate
from kvist.sim.des.report import Report
from kvist.sim.des.routing_spec import RouterKind
from kvist.sim.des.spec import (
    ClusterSpec,
    Fault,
    FaultKind,
    LinkSpec,
    LoadPolicy,
    Role,
    Scope,
    StoreSpec,
)
from kvist.sim.traces import Trace

TOKENS = 6401  # a hundred blocks and a token
BLOCKS = 100


def _one(tiers: StoreSpec, **changes: object) -> ClusterSpec:
    """A node whose HBM forgets, so that every hit is the store's."""
    return cluster(engine=engine(prefix_cache=False), store=tiers, **changes)


def _twice() -> Trace:
    return trace(request(0, "a", TOKENS), request(100, "a", TOKENS))


def test_a_prefix_in_dram_is_loaded_over_the_host_link() -> None:
    spec = _one(store(dram_blocks=200))
    report = simulate(spec, _twice())
    assert report.hit_tokens == {"hbm": 0, "dram": BLOCKS * BLOCK_TOKENS, "ssd": 0, "remote": 0}
    size_bytes = BLOCKS * BLOCK_BYTES
    assert report.links["d2h"].moved_bytes == size_bytes
    assert report.links["h2d"].moved_bytes == size_bytes
    load_s = 1e-3 + BLOCKS * 2e-5 + 1e-5 + size_bytes / spec.host_bytes_per_s()
    rest_s = PREFILL.prefill_s(1, BLOCKS * BLOCK_TOKENS)
    assert report.served[1].ttft_s == pytest.approx(load_s + rest_s, rel=1e-9)
    assert report.load_reasons == {"nothing_matched": 1, "load_all": 1}


def test_a_prefix_on_ssd_is_read_through_dram() -> None:
    report = simulate(_one(store(ssd_blocks=200)), _twice())
    assert report.hit_tokens["ssd"] == BLOCKS * BLOCK_TOKENS
    assert report.ssd_written_blocks == BLOCKS
    for kind in ("ssd_write", "ssd_read", "h2d"):
        assert report.links[kind].moved_bytes == BLOCKS * BLOCK_BYTES


def test_what_dram_lost_comes_back_from_ssd_without_another_copy() -> None:
    tiers = store(dram_blocks=110, ssd_blocks=1000)
    between = request(50, "b", TOKENS)
    report = simulate(_one(tiers), trace(*_twice().requests, between))
    assert report.hit_tokens["ssd"] > 80 * BLOCK_TOKENS
    # "a" and "b" were copied down once each; what was loaded again stands in DRAM already.
    assert report.links["d2h"].moved_bytes == 2 * BLOCKS * BLOCK_BYTES


SLOW = LinkSpec(ssd_read_bytes_per_s=1e8, ssd_write_bytes_per_s=1e9)


def _with_slow_disk(load: LoadPolicy) -> Report:
    return simulate(_one(store(ssd_blocks=200, load=load), links=SLOW), _twice())


def test_a_disk_slower_than_computing_is_not_read_unless_it_must() -> None:
    planned, always, never = (_with_slow_disk(p) for p in (LoadPolicy.PLANNED, LoadPolicy.ALWAYS,
                                                           LoadPolicy.NEVER))  # fmt: skip
    recompute_s = PREFILL.prefill_s(TOKENS, 0)
    assert never.served[1].ttft_s == pytest.approx(recompute_s, rel=1e-9)
    assert planned.served[1].ttft_s == pytest.approx(recompute_s, rel=1e-9)
    assert planned.load_reasons[Reason.RECOMPUTE_FASTER.value] == 1
    assert always.served[1].ttft_s > 5 * recompute_s


def test_a_load_that_falls_behind_is_cut_off_and_costs_little() -> None:
    """The disk becomes slow after the decision: the load is given up, the rest computed."""
    fault = Fault(FaultKind.SLOW_DISK, 0, 100.002, factor=0.001)
    spec = _one(store(ssd_blocks=200), faults=(fault,))
    report = simulate(spec, _twice())
    healthy = simulate(dataclasses.replace(spec, faults=()), _twice())
    assert report.loads_cut_off == 1
    assert report.served[1].ttft_s < 2.1 * PREFILL.prefill_s(TOKENS, 0)
    assert healthy.loads_cut_off == 0
    assert healthy.served[1].ttft_s < 0.5 * PREFILL.prefill_s(TOKENS, 0)


def test_loading_layer_by_layer_hides_behind_computing() -> None:
    again = request(100, "a", 2 * TOKENS, shared=BLOCKS, tail="t")
    requests = trace(request(0, "a", TOKENS), again)
    slow = LinkSpec(host_bytes_per_s=3e9)
    waits, hides = (
        simulate(_one(store(dram_blocks=999, overlap=overlap), links=slow), requests).served[1]
        for overlap in (Overlap.NONE, Overlap.LAYERWISE)
    )
    rest_s = PREFILL.prefill_s(2 * TOKENS - BLOCKS * BLOCK_TOKENS, BLOCKS * BLOCK_TOKENS)
    assert waits.cached_tokens == hides.cached_tokens == BLOCKS * BLOCK_TOKENS
    assert rest_s < hides.ttft_s < 1.1 * rest_s
    assert waits.ttft_s - rest_s == pytest.approx(
        1e-3 + BLOCKS * 2e-5 + 1e-5 + BLOCKS * BLOCK_BYTES / 3e9, rel=1e-6
    )


def _two_nodes(scope: Scope) -> Report:
    """A long prompt keeps its node busy, so the second one with the prefix goes to the other."""
    spec = cluster(
        2,
        engine=engine(prefix_cache=False, hbm_tokens=200_000),
        store=store(dram_blocks=2000, scope=scope),
        router=RouterKind.CACHE_AWARE,
    )
    busy = request(99.9, "a", 90_000, shared=BLOCKS, tail="busy")
    return simulate(spec, trace(request(0, "a", TOKENS), busy, request(100, "a", TOKENS)))


def test_peers_blocks_are_fetched_over_the_nics_and_kept() -> None:
    alone, peers, pooled = (_two_nodes(s) for s in (Scope.LOCAL, Scope.PEERS, Scope.GLOBAL))
    assert alone.hit_tokens["remote"] == 0
    for report in (peers, pooled):
        assert report.hit_tokens["remote"] == BLOCKS * BLOCK_TOKENS
        assert report.links["nic_in"].moved_bytes == BLOCKS * BLOCK_BYTES
        assert report.served[2].ttft_s < alone.served[2].ttft_s


def test_a_pool_over_all_nodes_adds_their_capacity_up() -> None:
    spec = cluster(
        2,
        engine=engine(prefix_cache=False),
        store=store(dram_blocks=60, scope=Scope.GLOBAL),
        roles=(Role.MIXED, Role.MIXED),
    )
    assert simulate(spec, _twice()).hit_ratio > 0.45


def test_blocks_beyond_what_the_disk_can_take_are_dropped_and_counted() -> None:
    links = LinkSpec(ssd_write_bytes_per_s=1e4)
    requests = [request(n, f"r{n}", 129) for n in range(100)]
    spec = _one(store(ssd_blocks=1000), links=links)
    report = simulate(spec, trace(*requests))
    assert report.saves_dropped == 2 * (100 - 64)
    assert report.ssd_written_blocks == 2 * 64


@pytest.mark.parametrize("policy", ["belady", "magic"])
def test_an_order_that_cannot_be_simulated_is_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match=r"\$\.store\.dram\.policy: unknown order"):
        simulate(_one(store(dram_blocks=10, policy=policy)), _twice())
