"""Whatever is simulated: nothing is lost, nothing is over its bound, and a seed says it all."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.cost.catalogue import model
from kvist.cost.decode import DecodeCoefficients
from kvist.cost.device import Hardware, device
from kvist.cost.plan_load import Overlap
from kvist.cost.prefill import PrefillCoefficients
from kvist.sim.des import cluster as des
from kvist.sim.des.gateways import Gateways
from kvist.sim.des.kernel import Kernel
from kvist.sim.des.links import Link, LinkKind, Network
from kvist.sim.des.report import End
from kvist.sim.des.routing_spec import AdmissionKind, Knows, RouterKind, RoutingSpec
from kvist.sim.des.spec import (
    ArrivalSpec,
    ClusterSpec,
    EngineSpec,
    Fault,
    FaultKind,
    Handover,
    LinkSpec,
    LoadPolicy,
    Prefilling,
    Role,
    Scope,
    Slo,
    StoreSpec,
    TierSpec,
)
from kvist.sim.traces import Request, Trace

BLOCK_TOKENS = 32
LLAMA = model("Llama-3-8B")
BLOCK_BYTES = LLAMA.token_bytes * BLOCK_TOKENS
ROLES = (
    (Role.MIXED,),
    (Role.MIXED,) * 3,
    (Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.MIXED, Role.DECODE),
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Up to forty requests of a few sessions, some at one moment, some larger than an engine."""
    requests, lengths, now_s = [], dict.fromkeys("abc", 0), 0.0
    for _ in range(draw(st.integers(1, 40))):
        now_s += draw(st.sampled_from((0.0, 0.01, 0.3, 2.0)))
        name = draw(st.sampled_from("abc"))
        lengths[name] += draw(st.integers(1, 400))
        tokens = lengths[name] if draw(st.booleans()) else draw(st.integers(1, 3000))
        keys = tuple(f"{name}{i}".encode() for i in range(-(-tokens // BLOCK_TOKENS)))
        requests.append(Request(now_s, keys, tokens, draw(st.integers(1, 200))))
    return Trace.of("t", BLOCK_TOKENS, requests)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    """Small nodes, so that everything runs full; all kinds of everything."""
    roles = draw(st.sampled_from(ROLES))
    tier = st.builds(
        TierSpec,
        st.integers(0, 200).map(lambda blocks: blocks * BLOCK_BYTES),
        st.sampled_from(("lru", "leaf-lru", "value", "second-sight", "s3-fifo")),
    )
    fault = st.builds(
        lambda kind, node, start, length: Fault(kind, node, start, start + length, 0.01),
        st.sampled_from(FaultKind),
        st.integers(0, len(roles) - 1),
        st.floats(0, 10),
        st.floats(0.01, 10),
    )
    knows = draw(st.sampled_from(Knows))
    booked = knows is Knows.BOOKINGS
    routing = RoutingSpec(
        knows,
        gateways=draw(st.sampled_from((1, 3))) if booked else 1,
        hold_s=draw(st.sampled_from((0.0, 0.2, math.inf))) if booked else math.inf,
        overtaken_s=draw(st.sampled_from((0.0, 5.0))),
    )
    admission = draw(st.sampled_from(AdmissionKind)) if booked else AdmissionKind.NONE
    return ClusterSpec(
        model=LLAMA,
        hardware=Hardware(device("h100")),
        roles=roles,
        engine=EngineSpec(
            prefilling=draw(st.sampled_from(Prefilling)),
            step_tokens=draw(st.sampled_from((64, 512, 4096))),
            max_sequences=draw(st.sampled_from((1, 4, 32))),
            prefix_cache=draw(st.booleans()),
            hbm_policy=draw(st.sampled_from(("lru", "leaf-lru"))),
            hbm_tokens=draw(st.sampled_from((1500, 4000, 20_000))),
            prefill=PrefillCoefficients(0.01, 1e-4, 1e-9),
            decode=DecodeCoefficients(0.02, 1e-4, 1e-7),
            handover=draw(st.sampled_from(Handover)),
        ),
        store=StoreSpec(
            dram=draw(tier),
            ssd=draw(tier),
            scope=draw(st.sampled_from(Scope)),
            load=draw(st.sampled_from(LoadPolicy)),
            overlap=draw(st.sampled_from((Overlap.NONE, Overlap.LAYERWISE))),
            ahead_requests=draw(st.sampled_from((1, 3, 8))),
        ),
        links=LinkSpec(
            host_bytes_per_s=draw(st.sampled_from((1e8, 5e10))),
            nic_bytes_per_s=draw(st.sampled_from((1e8, 1e10))),
            ssd_read_bytes_per_s=draw(st.sampled_from((1e7, 6e9))),
        ),
        router=draw(st.sampled_from(RouterKind)),
        admission=admission,
        routing=routing,
        slo=Slo(2.0, 0.1),
        arrivals=ArrivalSpec(spread=draw(st.booleans())),
        faults=tuple(draw(st.lists(fault, max_size=3))),
    )


def _watched(spec: ClusterSpec, trace: Trace, seed: int) -> tuple[des.Cluster, Any]:
    """Runs with every event followed by a look at what must always hold."""
    kernel = Kernel(seed)
    router = des.shipped_router(kernel, spec, trace.block_tokens)
    run = des.Cluster(kernel, spec, trace, router, None)
    last_s = -1.0
    while kernel._heap:
        time_s, _, _ = kernel._heap[0]
        assert time_s >= last_s
        last_s = time_s
        kernel.step()
        for engine in run.engines:
            pool = engine.pool
            assert 0 <= pool.nameless_tokens <= pool.used_tokens <= pool.capacity_tokens
        nodes = len(spec.roles) if spec.store.scope is Scope.GLOBAL else 1
        for node in run.store.nodes:
            for tier, tier_spec in ((node.dram, spec.store.dram), (node.ssd, spec.store.ssd)):
                if tier is not None:
                    assert len(tier) <= tier.capacity_blocks
                    assert tier.capacity_blocks * BLOCK_BYTES <= tier_spec.capacity_bytes * nodes
    return run, run.run()


@settings(max_examples=150)
@given(clusters(), traces(), st.integers(0, 3))
def test_every_request_ends_once_and_nothing_is_left(
    spec: ClusterSpec, trace: Trace, seed: int
) -> None:
    run, report = _watched(spec, trace, seed)
    assert report.requests == len(trace.requests)
    assert report.finished + report.rejected + report.failed == report.requests
    for served, request in zip(report.served, trace.requests, strict=True):
        assert served.end_s >= served.arrival_s >= 0
        if served.end is End.FINISHED:
            assert served.output_tokens == request.output_tokens
            assert served.ttft_s > 0
        assert served.cached_tokens < max(2, request.input_tokens)
    for engine in run.engines:
        assert engine.pool.nameless_tokens == 0
        assert engine.pool.spare_tokens == engine.pool.capacity_tokens
        assert (len(engine.batch), len(engine.waiting), len(engine.bound)) == (0, 0, 0)
        assert engine.bound_tokens == engine.batch.context_tokens == 0
    for node in run.store.nodes:
        assert node.saves == {}
        for pool in (node.dram, node.ssd):
            assert pool is None or (pool._pins, pool._arriving) == ({}, set())
        for path in node.times.paths:
            assert node.times.queued_bytes(path) == 0
        assert all(link.flows == {} for link in node.links.values())
    if isinstance(run._router, Gateways):
        assert run._router.booked == run._router.held == 0
    assert report.links["nic_in"].moved_bytes == pytest.approx(report.links["nic_out"].moved_bytes)


@settings(max_examples=30)
@given(clusters(), traces(), st.integers(0, 3))
def test_a_seed_gives_the_same_report_bit_by_bit(
    spec: ClusterSpec, trace: Trace, seed: int
) -> None:
    assert des.simulate(spec, trace, seed=seed) == des.simulate(spec, trace, seed=seed)


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.integers(0, 1000), st.sampled_from(((0,), (1,), (0, 1)))),
        min_size=1,
        max_size=20,
    ),
    st.lists(st.tuples(st.floats(0, 5), st.sampled_from((0.01, 0.5, 1.0))), max_size=4),
)
def test_links_move_every_byte_and_never_faster_than_they_can(
    flows: list[tuple[float, int, tuple[int, ...]]], changes: list[tuple[float, float]]
) -> None:
    kernel = Kernel(0)
    network = Network(kernel)
    links = [Link(LinkKind.H2D, 0, speed, 0.01) for speed in (100.0, 37.0)]
    ended: list[int] = []
    for number, (start_s, size, used) in enumerate(flows):
        chosen = [links[i] for i in used]
        kernel.at(start_s, lambda c=chosen, s=size, n=number: network.start(
            c, s, lambda: ended.append(n)))  # fmt: skip
    for at_s, factor in changes:
        kernel.at(at_s, lambda f=factor: network.set_factor(links[0], f))
    kernel.run()
    assert sorted(ended) == list(range(len(flows)))
    for number, link in enumerate(links):
        on_it = [size for _, size, used in flows if number in used]
        assert link.moved_bytes == sum(on_it)
        assert link.moved_bytes <= link.bytes_per_s * kernel.now_s * (1 + 1e-9)
        assert link.flows == {}
