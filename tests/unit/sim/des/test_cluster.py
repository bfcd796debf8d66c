"""Routing, admission and faults over several nodes."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
from small_cluster import PREFILL, cluster, engine, request, store, trace

from kvist.core.errors import ConfigError
from kvist.router.protocol import Ask
from kvist.sim.des.cluster import MAX_RETRIES, simulate
from kvist.sim.des.report import End, Report, Served
from kvist.sim.des.routing import ClusterView, Forgetful, Placement
from kvist.sim.des.routing_spec import AdmissionKind, Knows, RouterKind, RoutingSpec
from kvist.sim.des.spec import (
    ClusterSpec,
    Fault,
    FaultKind,
    LinkSpec,
    Prefilling,
    RandomFaults,
    Role,
    Scope,
    Slo,
)
from kvist.sim.traces import Request, Trace

PD = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)


def _sessions(count: int = 240, sessions: int = 12, rate: float = 4.0) -> Trace:
    """Turns of sessions in random order; each turn continues its session's prefix."""
    stream, turns = random.Random(3), [0] * sessions
    requests: list[Request] = []
    for n in range(count):
        who = stream.randrange(sessions)
        turns[who] += 1
        requests.append(request(n / rate, f"s{who}", 800 + 300 * turns[who], output=30))
    return trace(*requests)


def _mean_ttft(router: RouterKind, knows: Knows) -> float:
    spec = cluster(
        4,
        router=router,
        routing=RoutingSpec(knows),
        store=store(dram_blocks=4000),
        engine=engine(hbm_tokens=30_000),
    )
    return simulate(spec, _sessions()).ttft_s.mean


@pytest.mark.parametrize("knows", Knows)
def test_better_routers_give_shorter_ttft(knows: Knows) -> None:
    means = {router: _mean_ttft(router, knows) for router in RouterKind}
    assert means[RouterKind.RANDOM] > means[RouterKind.LEAST_LOADED]
    assert means[RouterKind.LEAST_LOADED] > means[RouterKind.CACHE_AWARE_LOCAL]
    assert means[RouterKind.CACHE_AWARE] <= means[RouterKind.CACHE_AWARE_LOCAL] * 1.05
    assert means[RouterKind.KVIST] < means[RouterKind.ROUND_ROBIN]
    assert means[RouterKind.KVIST] < means[RouterKind.POWER_OF_TWO]


JUDGING = [kind for kind in AdmissionKind if kind is not AdmissionKind.NONE]


def _held(**how: Any) -> list[Served]:
    routing = RoutingSpec(Knows.BOOKINGS, hold_s=0.1, **how)
    sizes = [20_000, 20_000, 8000, 20_000, 1000, 4000]
    requests = [request(n * 0.01, str(n), size) for n, size in enumerate(sizes)]
    chunks = engine(prefilling=Prefilling.CHUNKED, step_tokens=1000)
    spec = cluster(2, router=RouterKind.KVIST, routing=routing, engine=chunks)
    return list(simulate(spec, trace(*requests)).served)


def test_where_no_node_has_room_the_shortest_of_those_that_wait_goes_first() -> None:
    served = _held(overtaken_s=100.0)
    first_s = [s.arrival_s + s.ttft_s for s in served]
    assert sorted(range(6), key=first_s.__getitem__)[2:] == [4, 5, 2, 3]
    in_order = _held(overtaken_s=0.0)
    assert sum(s.ttft_s for s in served) < 0.95 * sum(s.ttft_s for s in in_order)


def test_gateways_tell_each_other_while_requests_wait_and_no_other_comes() -> None:
    """What one booked last was drawn for ever after: to the others no node ever had room."""
    routing = RoutingSpec(Knows.BOOKINGS, gateways=3, hold_s=0.0)
    requests = [request(n * 0.1, str(n), 10_000) for n in range(30)]
    spec = cluster(2, router=RouterKind.KVIST, routing=routing)
    assert simulate(spec, trace(*requests)).ttft_s.p99 < 60.0


def test_requests_wait_at_several_gateways_and_through_the_loss_of_every_node() -> None:
    faults = tuple(Fault(FaultKind.LOST_NODE, node, 2.1, 4.0) for node in range(2))
    routing = RoutingSpec(Knows.BOOKINGS, gateways=3, hold_s=0.1)
    requests = [request(n * 0.1, str(n), 10_000) for n in range(30)]
    spec = cluster(2, router=RouterKind.KVIST, routing=routing, faults=faults)
    report = simulate(spec, trace(*requests))
    assert report.finished + report.failed == report.requests
    assert report.finished
    assert report.failed  # those that had come when no node was there


@pytest.mark.parametrize("kind", JUDGING)
def test_admission_keeps_what_is_served_within_the_slo(kind: AdmissionKind) -> None:
    slo = Slo(ttft_s=1.0, tbt_s=1.0)
    over = _sessions(rate=20.0)
    served = cluster(slo=slo, admission=kind, routing=RoutingSpec(Knows.BOOKINGS))
    admitted, everything = (
        simulate(spec, over) for spec in (served, dataclasses.replace(
            served, admission=AdmissionKind.NONE))
    )  # fmt: skip
    assert admitted.rejected > 0
    assert admitted.refusals == {"ttft": admitted.rejected}
    assert admitted.goodput_rps > everything.goodput_rps
    assert everything.rejected == 0


@pytest.mark.parametrize("kind", [AdmissionKind.EARLY, AdmissionKind.PREDICTIVE])
def test_a_decode_that_cannot_keep_pace_refuses_at_the_door(kind: AdmissionKind) -> None:
    slo = Slo(ttft_s=100.0, tbt_s=0.001)
    spec = cluster(slo=slo, admission=kind, routing=RoutingSpec(Knows.BOOKINGS))
    report = simulate(spec, _sessions())
    assert set(report.refusals) == {"tbt"}  # but for those that come when it is idle
    assert report.rejected > 120


def test_baseline_refuses_only_what_was_computed_already() -> None:
    slo = Slo(ttft_s=100.0, tbt_s=0.001)
    spec = cluster(4, roles=PD, slo=slo, admission=AdmissionKind.BASELINE,
                   routing=RoutingSpec(Knows.BOOKINGS))  # fmt: skip
    report = simulate(spec, _sessions())
    assert set(report.refusals) == {"tbt_late"}
    assert report.rejected > 60
    computed = [s for s in report.served if s.refusal]
    assert all(s.end_s > s.arrival_s + PREFILL.prefill_s(100, 0) for s in computed)
    assert all(s.ttft_s == math.inf for s in computed)


def test_admission_without_bookings_is_refused_by_its_path() -> None:
    with pytest.raises(ConfigError, match=r"\$\.admission: .*routing\.knows: bookings"):
        cluster(admission=AdmissionKind.EARLY)


def test_another_router_fits_the_same_slot() -> None:
    class Last(Forgetful):
        def __init__(self) -> None:
            self.ended = 0

        def choose(self, ask: Ask, view: ClusterView) -> Placement:
            node = view.nodes()[-1]
            return Placement(node.index, node.index, 0.0)

        def over(self, request: str, tokens: int, now_s: float, *, failed: bool) -> None:
            assert tokens == 30
            self.ended += 1

    last = Last()
    report = simulate(cluster(3), _sessions(30), router=last)
    assert last.ended == report.finished == 30


def _with(faults: tuple[Fault, ...], **changes: object) -> Report:
    spec = cluster(4, store=store(dram_blocks=4000, ssd_blocks=4000), faults=faults, **changes)
    return simulate(spec, _sessions())


@pytest.mark.parametrize(
    ("roles", "node"),
    [((Role.MIXED,) * 4, 0), (PD, 0), (PD, 2)],
    ids=["mixed", "prefill", "decode"],
)
def test_requests_of_a_lost_node_are_served_elsewhere(roles: tuple[Role, ...], node: int) -> None:
    fault = Fault(FaultKind.LOST_NODE, node, 20.0, 40.0)
    healthy = _with((), roles=roles)
    report = _with((fault,), roles=roles)
    assert report.finished == report.requests == healthy.finished
    assert report.rerouted > 0
    assert [s.output_tokens for s in report.served] == [30] * report.requests


def test_without_a_node_that_is_alive_requests_fail() -> None:
    spec = cluster(1, faults=(Fault(FaultKind.LOST_NODE, 0, 10.0, 30.0),))
    report = simulate(spec, _sessions(200))
    assert report.failed > 0
    assert report.refusals == {"no_node": report.failed}
    assert report.finished == report.requests - report.failed
    assert {s.end for s in report.served[-10:]} == {End.FINISHED}  # it came back


def test_a_request_that_loses_its_node_too_often_fails() -> None:
    faults = tuple(
        Fault(FaultKind.LOST_NODE, node, 1.0 + n, 1.5 + n)
        for n in range(MAX_RETRIES + 2)
        for node in (n % 2,)
    )
    long = request(0.0, "a", 1000, output=5000)
    report = simulate(cluster(2, faults=faults), trace(long))
    assert report.refusals == {"lost": 1}
    assert report.rerouted == MAX_RETRIES + 1


def test_a_lost_peer_ends_the_loads_that_read_from_it() -> None:
    spec = cluster(
        2,
        engine=engine(prefix_cache=False, hbm_tokens=200_000),
        store=store(dram_blocks=3000, scope=Scope.PEERS),
        router=RouterKind.CACHE_AWARE,
        links=LinkSpec(nic_bytes_per_s=2e9),
        faults=(Fault(FaultKind.LOST_NODE, 0, 100.2),),
    )
    busy = request(99.9, "a", 90_000, shared=100, tail="busy")
    report = simulate(spec, trace(request(0, "a", 6401), busy, request(100, "a", 6401)))
    assert report.loads_failed == 1
    assert report.finished == 3


def test_a_degraded_nic_slows_the_way_to_decode_for_a_while() -> None:
    fault = tuple(Fault(FaultKind.DEGRADED_LINK, n, 10.0, 30.0, 0.001) for n in (0, 1))
    assert _with(fault, roles=PD).tbt_s.p99 > 3 * _with((), roles=PD).tbt_s.p99


def test_random_faults_come_by_seed() -> None:
    drawn = RandomFaults(lost_nodes=2, slow_disks=1, degraded_links=1, lasting_s=10.0)
    spec: ClusterSpec = cluster(4, random_faults=drawn, store=store(dram_blocks=500))
    one, again, other = (simulate(spec, _sessions(), seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one.served != other.served
    assert one.finished + one.failed == one.requests


def test_progress_counts_the_requests_that_ended() -> None:
    seen: list[int] = []
    simulate(cluster(2), _sessions(200), progress=seen.append)
    assert seen == [50, 100, 150, 200]


def test_effective_share_at_another_slo_needs_no_other_run() -> None:
    report = simulate(cluster(2), _sessions())
    assert report.effective(Slo(1e9, 1e9)) == 1.0
    assert report.effective(Slo(PREFILL.a_s / 2, 1e9)) == 0.0
    assert report.effective(report.slo) == report.effective_ratio
    assert "served" not in report.to_dict()
