"""`plan_load` against brute force over all splits, and what must hold of every decision."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.core.errors import ConfigError
from kvist.core.outcome import Match, Tier
from kvist.cost.plan_load import (
    LoadCosts,
    LoadDecision,
    Overlap,
    Reason,
    fell_behind,
    floor_blocks,
    plan_load,
)
from kvist.cost.prefill import PrefillCoefficients
from kvist.cost.transfer import PathSpeed, PathState

LOADED = {Reason.LOAD_ALL, Reason.LOAD_HEAD, Reason.LOAD_TAIL}
OVERLAPS = st.sampled_from(list(Overlap))


@st.composite
def _path(draw: st.DrawFn) -> PathState:
    rate = draw(st.one_of(st.just(0.0), st.floats(5, 11).map(lambda e: 10**e)))
    return PathState(
        PathSpeed(draw(st.floats(0, 0.1)), rate), draw(st.sampled_from([0, 10**6, 10**9]))
    )


@st.composite
def _case(draw: st.DrawFn) -> tuple[Match, LoadCosts]:
    block_tokens = draw(st.sampled_from([1, 16, 64]))
    tiers = draw(st.lists(st.sampled_from(list(Tier)), max_size=12))
    tiers = draw(st.sampled_from([tiers, tiers[:1] * len(tiers)]))
    computed = draw(st.integers(0, 3 * block_tokens))
    spare = draw(st.integers(0, 20 * block_tokens))
    prompt = max(computed + 1, (computed // block_tokens + len(tiers)) * block_tokens + spare)
    paths = {t: draw(_path()) for t in (Tier.DRAM, Tier.SSD, Tier.REMOTE)}
    if draw(st.booleans()):
        del paths[Tier.REMOTE]
    prefill = PrefillCoefficients(
        draw(st.floats(0, 0.05)), draw(st.floats(1e-7, 1e-3)), draw(st.floats(0, 1e-7))
    )
    costs = LoadCosts(
        prompt, block_tokens, draw(st.integers(1, 10**7)), prefill, paths, computed,
        layers=draw(st.integers(1, 80)), per_load_s=draw(st.floats(0, 0.01)),
        per_block_s=draw(st.floats(0, 0.001)),
    )  # fmt: skip
    return Match(tuple(tiers)), costs


def _load_s(tiers: tuple[Tier, ...], costs: LoadCosts) -> float:
    if not tiers:
        return 0.0
    own = sum(costs.start_s(t) for t in set(tiers))
    return costs.per_load_s + own + sum(costs.block_s(t) for t in tiers)


def _total_s(tiers: tuple[Tier, ...], blocks: int, costs: LoadCosts, overlap: Overlap) -> float:
    """Seconds to the last token if the first `blocks` are loaded, told one layer at a time."""
    done = costs.tokens_with(blocks)
    load = _load_s(tiers[:blocks], costs)
    rest = costs.compute_s(done, costs.prompt_tokens)
    if overlap is not Overlap.LAYERWISE or not blocks:
        return load + rest
    arrived = computed = 0.0
    for _ in range(costs.layers):
        arrived += load / costs.layers
        computed = max(arrived, computed) + rest / costs.layers
    return computed


def _tail_s(tiers: tuple[Tier, ...], blocks: int, costs: LoadCosts) -> float:
    head = costs.tokens_with(len(tiers) - blocks)
    head_s = costs.compute_s(costs.computed_tokens, head)
    tail_s = _load_s(tiers[len(tiers) - blocks :], costs)
    return max(head_s, tail_s) + costs.compute_s(costs.tokens_with(len(tiers)), costs.prompt_tokens)


def _usable(match: Match, costs: LoadCosts) -> tuple[Tier, ...]:
    count = 0
    for index, tier in enumerate(match.tiers):
        useful = costs.tokens_with(index) < costs.prompt_tokens - 1
        if not useful or math.isinf(costs.block_s(tier)):
            break
        count += 1
    return match.tiers[:count]


@given(_case(), OVERLAPS)
def test_plan_is_the_best_of_all_splits(case: tuple[Match, LoadCosts], overlap: Overlap) -> None:
    match, costs = case
    tiers = _usable(match, costs)
    splits = [_total_s(tiers, k, costs, overlap) for k in range(len(tiers) + 1)]
    if overlap is Overlap.BOTH_ENDS:
        splits += [_tail_s(tiers, k, costs) for k in range(1, len(tiers) + 1)]
    decision = plan_load(match, costs, overlap)
    assert decision.predicted_s == pytest.approx(min(splits), rel=1e-9, abs=1e-12)


@given(_case(), OVERLAPS)
def test_plan_is_never_predicted_to_be_slower_than_recomputing(
    case: tuple[Match, LoadCosts], overlap: Overlap
) -> None:
    match, costs = case
    decision = plan_load(match, costs, overlap)
    whole = costs.compute_s(costs.computed_tokens, costs.prompt_tokens)
    assert decision.recompute_s == pytest.approx(whole)
    assert decision.predicted_s <= decision.recompute_s * (1 + 1e-12)
    assert decision.saved_s >= -1e-12 * whole


@given(_case(), OVERLAPS)
def test_a_decision_is_consistent_with_itself(
    case: tuple[Match, LoadCosts], overlap: Overlap
) -> None:
    match, costs = case
    d = plan_load(match, costs, overlap)
    assert d.load_blocks + d.recompute_blocks == len(match)
    assert 0 <= d.first_block <= d.first_block + d.load_blocks <= len(match)
    assert (d.load_blocks > 0) == (d.reason in LOADED)
    assert d.first_block == 0 or d.reason is Reason.LOAD_TAIL
    assert (d.reason is Reason.NOTHING_MATCHED) == (not match.tiers)
    assert d.load_s <= d.cutoff_s * (1 + 1e-9)
    loaded = match.tiers[d.first_block : d.first_block + d.load_blocks]
    assert d.load_s == pytest.approx(_load_s(loaded, costs))
    assert d == plan_load(match, costs, overlap)


@given(_case(), OVERLAPS, st.floats(1, 1000))
def test_more_bandwidth_is_never_slower(
    case: tuple[Match, LoadCosts], overlap: Overlap, factor: float
) -> None:
    match, costs = case
    faster = {
        t: PathState(PathSpeed(p.speed.latency_s, p.speed.bytes_per_s * factor), p.queued_bytes)
        for t, p in costs.paths.items()
    }
    before = plan_load(match, costs, overlap).predicted_s
    after = plan_load(match, dataclasses.replace(costs, paths=faster), overlap).predicted_s
    assert after <= before * (1 + 1e-9)


@given(_case(), OVERLAPS)
def test_more_overlap_is_never_slower_and_a_longer_match_neither(
    case: tuple[Match, LoadCosts], overlap: Overlap
) -> None:
    match, costs = case
    plain = plan_load(match, costs, Overlap.NONE).predicted_s
    assert plan_load(match, costs, overlap).predicted_s <= plain * (1 + 1e-9)
    if match.tiers and overlap is not Overlap.BOTH_ENDS:
        shorter = plan_load(Match(match.tiers[:-1]), costs, overlap).predicted_s
        assert plan_load(match, costs, overlap).predicted_s <= shorter * (1 + 1e-9)


@given(_case(), OVERLAPS)
def test_without_bandwidth_everything_is_recomputed(
    case: tuple[Match, LoadCosts], overlap: Overlap
) -> None:
    match, costs = case
    match = Match(tuple(t for t in match.tiers if t is not Tier.HBM))
    dead = {t: PathState(PathSpeed(0.0, 0.0)) for t in costs.paths}
    for paths in (dead, {}):
        d = plan_load(match, dataclasses.replace(costs, paths=paths), overlap)
        assert d.load_blocks == 0
        assert d.reason in (Reason.NO_PATH, Reason.NOTHING_MATCHED)
        assert d.predicted_s == d.recompute_s


@given(_case(), OVERLAPS)
def test_a_load_that_ends_at_its_cutoff_is_as_slow_as_recomputing(
    case: tuple[Match, LoadCosts], overlap: Overlap
) -> None:
    match, costs = case
    d = plan_load(match, costs, overlap)
    if d.cutoff_s <= d.load_s * (1 + 1e-6):
        return  # nothing to load, or nothing to gain
    rest = costs.compute_s(costs.tokens_with(d.first_block + d.load_blocks), costs.prompt_tokens)
    layers = costs.layers if overlap is Overlap.LAYERWISE else 1
    total = (d.cutoff_s + (layers - 1) * max(d.cutoff_s, rest) + rest) / layers
    assert total == pytest.approx(d.recompute_s, rel=1e-6)


@given(_case(), st.floats(0.01, 0.5))
def test_a_margin_refuses_what_saves_less(case: tuple[Match, LoadCosts], margin: float) -> None:
    match, costs = case
    plain = plan_load(match, costs)
    strict = plan_load(match, dataclasses.replace(costs, margin_ratio=margin))
    if plain.predicted_s > plain.recompute_s * (1 - margin):
        assert strict.load_blocks == 0
        assert (strict.reason is Reason.WITHIN_MARGIN) == (plain.load_blocks > 0)
    else:
        assert strict == plain


@given(_case())
def test_below_its_floor_no_run_is_loaded_at_the_start_of_a_prompt(
    case: tuple[Match, LoadCosts],
) -> None:
    match, costs = case
    # The floor leaves attention out: without it, it is exact.
    flat = dataclasses.replace(costs.prefill, c_s=0.0)
    tier, prompt = Tier.SSD, 1 + len(match) * costs.block_tokens
    costs = dataclasses.replace(costs, prefill=flat, computed_tokens=0, prompt_tokens=prompt)
    d = plan_load(Match((tier,) * len(match)), costs)
    floor = floor_blocks(tier, costs)
    if len(match) < floor - 1:
        assert d.load_blocks == 0
    elif len(match) > floor:
        assert d.load_blocks > 0


def _plain(rate: float, **more: float) -> tuple[Match, LoadCosts]:
    prefill = PrefillCoefficients(0.0, 1e-4, 0.0)  # 16 tokens: 1.6 ms
    costs = LoadCosts(
        1601, 16, 10**6, prefill, {Tier.SSD: PathState(PathSpeed(0.001, rate))}, layers=32, **more
    )  # type: ignore[arg-type]
    return Match((Tier.SSD,) * 100), costs


def test_reasons_tell_a_slow_path_from_a_short_run() -> None:
    match, costs = _plain(1e8)  # 10 ms a block
    assert plan_load(match, costs).reason is Reason.RECOMPUTE_FASTER
    assert floor_blocks(Tier.SSD, costs) == math.inf
    match, costs = _plain(1e9, per_load_s=0.1)  # 1 ms a block, 0.6 ms gained
    assert floor_blocks(Tier.SSD, costs) == 169
    assert plan_load(match, costs).reason is Reason.BELOW_FLOOR
    match, costs = _plain(1e9)
    assert plan_load(match, costs).reason is Reason.LOAD_ALL
    assert floor_blocks(Tier.DRAM, costs) == math.inf
    assert floor_blocks(Tier.HBM, costs) == 0


def test_a_tail_on_a_slow_tier_is_computed() -> None:
    _, costs = _plain(1e9)
    slow = PathState(PathSpeed(0.001, 1e8))
    costs = dataclasses.replace(costs, paths={**costs.paths, Tier.REMOTE: slow})
    mixed = Match((Tier.SSD,) * 60 + (Tier.REMOTE,) * 40)
    d = plan_load(mixed, costs)
    assert (d.reason, d.load_blocks, d.recompute_blocks) == (Reason.LOAD_HEAD, 60, 40)


def test_both_ends_meet_in_the_middle() -> None:
    """A path as fast as the processor: half is loaded, half computed, in half the time."""
    match, costs = _plain(1e6 / 1.6e-3)
    d = plan_load(match, costs, Overlap.BOTH_ENDS)
    assert d.reason is Reason.LOAD_TAIL
    assert d.load_blocks in (49, 50)
    assert d.predicted_s == pytest.approx(d.recompute_s / 2, rel=0.02)
    assert plan_load(match, costs, Overlap.NONE).load_blocks == 0


def test_layerwise_hides_the_load_behind_what_must_be_computed_anyway() -> None:
    prefill = PrefillCoefficients(0.0, 1e-4, 0.0)
    path = {Tier.DRAM: PathState(PathSpeed(0.0, 1e9))}
    costs = LoadCosts(3200, 16, 10**6, prefill, path, layers=80)
    d = plan_load(Match((Tier.DRAM,) * 100), costs, Overlap.LAYERWISE)
    assert d.load_blocks == 100
    assert d.predicted_s == pytest.approx(0.16 + 0.1 / 80)


def _on_time(d: LoadDecision, costs: LoadCosts, arrived: int, elapsed_s: float) -> bool:
    return not fell_behind(d, costs, arrived, elapsed_s)


def test_a_load_is_cut_off_when_its_pace_loses_and_not_before() -> None:
    match, costs = _plain(1e9)
    d = plan_load(match, costs)
    assert d.load_s == pytest.approx(0.101)
    assert d.cutoff_s == pytest.approx(0.16)
    assert _on_time(d, costs, 0, 0.05)  # nothing there yet, but not late
    assert _on_time(d, costs, 90, 0.12)  # late, and nearly done: 13 ms against 16 ms
    assert fell_behind(d, costs, 20, 0.12)  # late, with 80 blocks to come at 6 ms
    assert fell_behind(d, costs, 99, 0.16)  # by now recomputing would have been as fast
    assert _on_time(d, costs, 100, 9.0)  # all there
    tail = plan_load(*_plain(1e6 / 1.6e-3), Overlap.BOTH_ENDS)
    assert fell_behind(tail, costs, 1, tail.load_s * 1.01)


def test_one_token_is_always_left_to_compute() -> None:
    match, costs = _plain(1e11)
    costs = dataclasses.replace(costs, prompt_tokens=1600)
    d = plan_load(match, costs)
    assert d.load_blocks == 100
    assert costs.tokens_with(100) == 1599
    assert d.predicted_s > d.load_s


def test_a_plan_for_128k_tokens_is_made_of_all_its_blocks() -> None:
    prefill = PrefillCoefficients(0.0307, 9.2e-5, 9.27e-10)
    path = {Tier.REMOTE: PathState(PathSpeed(0.002, 2e9))}
    costs = LoadCosts(131072, 16, 16 * 327680, prefill, path, layers=80)
    d = plan_load(Match((Tier.REMOTE,) * 8191), costs)
    assert d.recompute_s == pytest.approx(28, rel=0.02)
    # 2 GB/s is above the break-even of 128 k tokens (1.5 GB/s) and below that of the first 8 k.
    assert d.reason is Reason.LOAD_ALL
    assert d.predicted_s == pytest.approx(21.5, rel=0.02)


@pytest.mark.parametrize(
    ("name", "value"),
    [("prompt_tokens", 0), ("block_tokens", 0), ("block_bytes", -1), ("layers", 0),
     ("computed_tokens", 1601), ("per_load_s", -1.0), ("per_block_s", math.nan),
     ("margin_ratio", 1.0)],
)  # fmt: skip
def test_costs_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    _, costs = _plain(1e9)
    with pytest.raises(ConfigError, match=name):
        dataclasses.replace(costs, **{name: value})
