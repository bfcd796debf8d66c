"""Curve, knees, replicas and samples: each against what can be worked out by hand."""

from __future__ import annotations

import pytest
from deployments import facts, question

from kvist.core.errors import ConfigError
from kvist.cost.device import Hardware, device
from kvist.sim.advise.advice import CurvePoint, MarginalPoint
from kvist.sim.advise.curve import Curve, Reach, capacities, knee_bytes, marginal, measure
from kvist.sim.advise.question import Disks, Market, Medium
from kvist.sim.advise.replicas import MOST_BUSY_RATIO, fleet
from kvist.sim.advise.sample import sample
from kvist.sim.advise.traffic import ideal, saved_s, traffic
from kvist.sim.advise.worth import worth
from kvist.sim.synthetic import synthetic
from kvist.sim.traces import Request, Trace


def _curve(*points: tuple[int, float, float]) -> Curve:
    return Curve.of([CurvePoint("p", size, hit, saved, 0.0) for size, hit, saved in points], "p")


def test_saved_time_is_what_the_cost_model_says_of_both_prefills() -> None:
    prefill = question().prefill
    whole, rest = prefill.prefill_s(5_000, 0), prefill.prefill_s(2_000, 3_000)
    assert saved_s(prefill, 3_000, 3_000**2) == pytest.approx(whole - rest)


def test_a_cache_without_end_hits_what_came_before() -> None:
    requests = [
        Request(0.0, (b"a", b"b"), 150),
        Request(7.0, (b"a", b"b"), 150),
        Request(9.0, (b"a", b"c"), 200),
    ]
    found = ideal(requests, 100)
    assert found.hit_tokens == (0, 150, 100)
    assert found.gaps == ((7.0, 150), (2.0, 100))
    assert found.gap_quantiles_s(0.3, 0.5, 1.0) == (2.0, 7.0, 7.0)
    assert found.reused_within(5.0) == 0.4


def test_replays_at_all_blocks_reach_the_ideal_and_its_saved_time() -> None:
    trace, asked = synthetic("agent", 150, 1.0, 0), question()
    known = ideal(trace.requests, trace.block_tokens)
    found = traffic(trace, known, asked)
    part = sample(trace, known, 10**9, 0)
    points = measure(part, found, asked, lambda share: None)
    for point in points:
        if point.capacity_bytes == found.unique_bytes:
            assert point.token_hit_ratio == pytest.approx(found.ideal_hit_ratio)
            assert point.saved_device_s == pytest.approx(found.ideal_saved_device_s, rel=1e-6)


def test_capacities_go_from_the_engines_pool_to_all_blocks_evenly_in_log() -> None:
    sizes = capacities(100_000, 100, 4)
    assert sizes == [100, 1_000, 10_000, 100_000]
    assert capacities(100, 10**6, 8)[0] == 1
    assert capacities(1, 10, 8) == [1]


def test_curve_never_falls_and_reaches_zero_with_no_capacity() -> None:
    curve = _curve((100, 0.2, 10.0), (200, 0.1, 5.0), (400, 0.5, 20.0))
    assert [curve.hit_ratio(size) for size in (0, 50, 100, 200, 400, 9_999)] == [
        0.0, 0.1, 0.2, 0.2, 0.5, 0.5,
    ]  # fmt: skip


def test_knee_is_where_a_gigabyte_stops_earning_its_price() -> None:
    slopes = [MarginalPoint(10, 5.0), MarginalPoint(20, 1.0), MarginalPoint(30, 0.1)]
    assert knee_bytes(slopes, 1.0) == 20
    assert knee_bytes(slopes, 1.0 + 1e-9) == 10
    assert knee_bytes(slopes, 9.0) == 0


def test_marginal_value_is_the_hulls_so_it_only_falls() -> None:
    giga = 10**9
    curve = _curve((giga, 0.1, 0.0), (2 * giga, 0.1, 0.0), (3 * giga, 0.5, 100.0))
    slopes = marginal(curve, facts(), question(), Reach(giga, 0.1, 0.0), 0.0)
    assert [point.capacity_bytes for point in slopes] == [3 * giga]
    # 100 node seconds in 100 s are a node that is not needed: 8 devices at $2.5, for 3 GB: the
    # first of them holds what is above it.
    assert slopes[0].dollars_per_gb_hour == pytest.approx(20 / 3)


def test_a_tier_slower_than_computing_gets_nothing() -> None:
    tera = 10**12  # beyond what HBM holds
    curve = _curve((tera, 0.1, 0.0), (50 * tera, 0.6, 100.0))
    known = ideal([Request(0.0, (b"a",), 100)], 100)
    slow = question(disks=Disks(read_bytes_per_s=1e8))
    own = fleet(curve, facts(), slow)
    market = question(market=Market(2.5, dram_gb_per_hour=1e9), dram_bytes=0)
    dear = worth(curve, curve, known, facts(), market, own)
    assert dear.tiers[0].worth_bytes == 0 < dear.tiers[1].worth_bytes
    both = worth(
        curve,
        curve,
        known,
        facts(),
        question(market=market.market, disks=slow.disks, dram_bytes=0),
        own,
    )
    assert not both.tiers[1].pays
    assert both.bought_bytes == 0
    assert both.savings.net_dollars_per_month == 0


def test_ssd_that_wears_off_faster_than_it_earns_is_not_bought() -> None:
    tera = 10**12
    points = [CurvePoint("p", tera, 0.1, 0.0, 0.0), CurvePoint("p", 9 * tera, 0.6, 100.0, 1e15)]
    curve, known = Curve.of(points, "p"), ideal([Request(0.0, (b"a",), 100)], 100)
    dear_dram = Market(2.5, dram_gb_per_hour=1e9)
    gentle, harsh = (
        worth(
            curve,
            curve,
            known,
            facts(),
            asked := question(market=dear_dram, disks=Disks(dollars_per_tb=price), dram_bytes=0),
            fleet(curve, facts(), asked),
        )
        for price in (1e-6, 1e6)
    )
    assert gentle.tiers[1].worth_bytes > 0 == harsh.tiers[1].worth_bytes
    # 1 PB in 100 s are 864 PB a day on drives that take their capacity 1,825 times.
    assert gentle.wear.tb_per_day == pytest.approx(864_000)
    assert gentle.wear.lifetime_days == pytest.approx(1825 / gentle.wear.drive_writes_per_day)
    assert harsh.savings.net_dollars_per_month == 0


def test_no_ssd_is_bought_behind_dram_that_comes_near_the_ideal() -> None:
    tera = 10**12
    curve = _curve((tera, 0.1, 0.0), (2 * tera, 0.59, 100.0), (3 * tera, 0.6, 101.0))
    known = ideal([Request(0.0, (b"a",), 100)], 100)
    own = fleet(curve, facts(), question())
    found = worth(curve, curve, known, facts(), question(), own)
    assert found.tiers[0].worth_bytes > 0 == found.tiers[1].worth_bytes


def test_replicas_are_the_fewest_that_the_engine_alone_can_do_with() -> None:
    curve, asked = _curve((10**9, 0.0, 0.0), (10**12, 0.0, 0.0)), question()
    busy = facts(prefill_device_s=500.0, output_tokens=0)
    own = fleet(curve, busy, asked)
    assert own.nodes == 6  # five nodes' time, below nine tenths
    assert own.utilisation_ratio < MOST_BUSY_RATIO
    assert fleet(curve, busy, question(nodes=5)).utilisation_ratio >= MOST_BUSY_RATIO
    running = fleet(curve, facts(output_tokens=10**6), question(nodes=1))
    assert running.cache_bytes < own.cache_bytes / own.nodes


def test_a_sample_of_sessions_keeps_the_ideal_and_scales_the_cache() -> None:
    trace = synthetic("chat", 3_000, 3.4, 0)
    known = ideal(trace.requests, trace.block_tokens)
    part = sample(trace, known, trace.accesses_blocks // 4, 0)
    assert 0.15 < part.share_ratio <= 0.25
    assert abs(part.ideal_error_ratio) < 0.02
    assert part.unique_ratio == pytest.approx(part.share_ratio, rel=0.2)
    assert part.capacity_blocks(trace.unique_blocks) == pytest.approx(
        part.trace.unique_blocks, rel=0.02
    )
    sessions = {request.session for request in part.trace.requests}
    whole = [request for request in trace.requests if request.session in sessions]
    assert len(part.trace.requests) > 0.9 * len(whole)


def test_a_sample_replays_to_the_same_curve_as_the_whole() -> None:
    trace, asked = synthetic("chat", 2_000, 3.4, 0), question()
    known = ideal(trace.requests, trace.block_tokens)
    found = traffic(trace, known, asked)
    whole, part = (
        measure(sample(trace, known, most, 0), found, asked, lambda share: None)
        for most in (10**9, trace.accesses_blocks // 3)
    )
    for one, other in zip(whole, part, strict=True):
        assert one.capacity_bytes == other.capacity_bytes
        assert one.token_hit_ratio == pytest.approx(other.token_hit_ratio, abs=0.05)


def test_a_sample_of_one_tree_is_the_whole() -> None:
    trace = Trace.of("t", 10, [Request(float(n), (b"a", b"%d" % n), 20) for n in range(9)])
    known = ideal(trace.requests, 10)
    assert sample(trace, known, 100, 0).trace is trace
    assert sample(trace, known, 1, 0).trace.requests


def test_models_that_do_not_fit_and_prices_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        question(hardware=Hardware(device("h100"), 1))
    with pytest.raises(ConfigError, match="--nodes"):
        question(nodes=0)
    with pytest.raises(ConfigError, match="--host-dram"):
        question(dram_bytes=-1)
    for name, price in (("--device-price", 0.0), ("--dram-price", -1.0), ("--ssd-price", 0.0)):
        prices = {"--device-price": 1.0, "--dram-price": 1.0, "--ssd-price": 1.0, name: price}
        with pytest.raises(ConfigError, match=name):
            Market(*prices.values())
    with pytest.raises(ConfigError, match="--ssd-endurance"):
        Disks(endurance_dwpd=0.0)


def test_ssd_is_never_faster_than_the_link_behind_it() -> None:
    asked = question(disks=Disks(read_bytes_per_s=1e15))
    assert asked.path(Medium.SSD).bytes_per_s == asked.path(Medium.DRAM).bytes_per_s


def test_dram_that_hosts_have_costs_nothing_and_more_has_its_price() -> None:
    tera = 10**12
    curve = _curve((tera // 10, 0.1, 0.0), (tera, 0.3, 50.0), (4 * tera, 0.6, 100.0))
    known = ideal([Request(0.0, (b"a",), 100)], 100)
    found = []
    for host_bytes in (0, tera, 4 * tera):
        asked = question(dram_bytes=host_bytes)
        figures = facts(unique_bytes=4 * tera)
        own = fleet(curve, figures, asked)
        found.append(worth(curve, curve, known, figures, asked, own).tiers[0])
    nothing, some, enough = found
    assert nothing.cost_per_hour == pytest.approx(nothing.worth_bytes / 1e9 * 0.005)
    assert some.worth_bytes >= tera
    assert some.cost_per_hour == pytest.approx((some.worth_bytes - tera) / 1e9 * 0.005)
    assert (enough.worth_bytes, enough.cost_per_hour) == (4 * tera, 0.0)


def test_dram_of_hosts_that_helps_nothing_is_not_advised() -> None:
    curve = _curve((10**12, 0.0, 0.0), (10**13, 0.0, 0.0))
    known = ideal([Request(0.0, (b"a",), 100)], 100)
    own = fleet(curve, facts(), question())
    assert worth(curve, curve, known, facts(), question(), own).bought_bytes == 0
