"""What an engine learns of its speed, and what follows for a load."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvist.connectors.appraiser import Appraiser
from kvist.connectors.speeds import Speeds
from kvist.core.outcome import Match, ReadTotals, Tier
from kvist.cost.plan_load import LoadDecision, Reason
from kvist.cost.prefill import PrefillCoefficients

TRUE = PrefillCoefficients(5e-3, 1e-3, 2e-8)
SEED = PrefillCoefficients(1e-3, 1e-5, 1e-9)  # a data sheet's, far too fast
BLOCK_TOKENS, BLOCK_BYTES = 16, 1 << 20


def _appraiser(*, planned: bool = True, known: Speeds | None = None) -> Appraiser:
    return Appraiser(
        SEED, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES, planned=planned, known=known
    )


def _learned(**more: bool) -> Appraiser:
    found = _appraiser(**more)
    for i in range(50):
        new, old = 64 * (1 + i % 8), 512 * (i % 3)
        found.passed([(new, old)], TRUE.prefill_s(new, old))
    return found


def _read(appraiser: Appraiser, block_s: float, blocks: int = 40) -> None:
    for n in range(1, blocks + 1):
        appraiser.read({Tier.SSD: ReadTotals(n * BLOCK_BYTES, n * block_s)})


def _reason(appraiser: Appraiser, tiers: list[Tier], prompt: int = 1000) -> Reason:
    match = Match(tuple(tiers))
    return appraiser.plan(match, prompt_tokens=prompt, computed_tokens=0).decision.reason


def test_after_fifty_passes_predictions_are_within_a_few_percent() -> None:
    found = _learned()
    assert found.prefill_error_ratio is not None
    assert found.prefill_error_ratio < 0.05
    assert found.predicted_s([(700, 100)]) == pytest.approx(TRUE.prefill_s(700, 100), rel=0.1)


def test_a_pass_over_several_requests_costs_its_fixed_part_once() -> None:
    found = _learned()
    both = found.predicted_s([(100, 0), (200, 0)])
    apart = found.predicted_s([(100, 0)]) + found.predicted_s([(200, 0)])
    assert both < apart


def test_nothing_is_refused_before_passes_were_seen() -> None:
    found = _appraiser()
    _read(found, 10.0)
    assert _reason(found, [Tier.SSD] * 8) is Reason.UNMEASURED


def test_a_configuration_that_wants_all_gets_all() -> None:
    found = _learned(planned=False)
    _read(found, 10.0)
    assert _reason(found, [Tier.SSD] * 8) is Reason.TOLD_TO


@pytest.mark.parametrize(
    ("block_s", "reason"),
    [(1e-3, Reason.LOAD_ALL), (0.1, Reason.RECOMPUTE_FASTER)],
    ids=["fast", "slow"],
)
def test_a_tier_is_used_as_it_was_measured(block_s: float, reason: Reason) -> None:
    found = _learned()
    _read(found, block_s)
    assert _reason(found, [Tier.SSD] * 32) is reason


def test_an_unread_tier_is_given_a_try_with_a_cut_off() -> None:
    found = _learned()
    match = Match((Tier.SSD,) * 32)
    appraisal = found.plan(match, prompt_tokens=1000, computed_tokens=0)
    assert appraisal.decision.reason is Reason.LOAD_ALL
    assert not appraisal.behind(0, 0.001)
    assert appraisal.behind(0, TRUE.prefill_s(1000, 0))
    assert not appraisal.behind(32, 100.0)


def test_what_is_queued_on_a_tier_counts() -> None:
    found = _learned()
    _read(found, 5e-3)
    match = Match((Tier.SSD,) * 16)
    queued = {Tier.SSD: 1000 * BLOCK_BYTES}
    idle = found.plan(match, prompt_tokens=300, computed_tokens=0)
    busy = found.plan(match, prompt_tokens=300, computed_tokens=0, queued_bytes=queued)
    assert idle.decision.load_blocks == 16
    assert busy.decision.load_blocks == 0


def test_a_tier_that_turns_slow_is_seen_within_a_second_and_one_that_heals_too() -> None:
    found = _learned()
    _read(found, 1e-3)
    totals = ReadTotals(40 * BLOCK_BYTES, 0.04)
    for _ in range(10):  # 1 s of reads at a tenth of a second a block
        totals = ReadTotals(totals.size_bytes + BLOCK_BYTES, totals.busy_s + 0.1)
        found.read({Tier.SSD: totals})
    assert _reason(found, [Tier.SSD] * 32) is Reason.RECOMPUTE_FASTER
    for _ in range(1000):
        totals = ReadTotals(totals.size_bytes + 2 * BLOCK_BYTES, totals.busy_s + 2e-3)
        found.read({Tier.SSD: totals})
    assert _reason(found, [Tier.SSD] * 32) is Reason.LOAD_ALL


def test_a_tier_that_brings_nothing_becomes_slow_and_not_unknown() -> None:
    found = _learned()
    for n in range(1, 12):
        found.read({Tier.SSD: ReadTotals(0, 0.6 * n)})
    assert _reason(found, [Tier.SSD] * 32) is Reason.RECOMPUTE_FASTER


def test_what_was_learned_serves_the_next_start_from_its_first_request() -> None:
    speeds = _learned().speeds()
    assert speeds is not None
    found = _appraiser(known=speeds)
    _read(found, 0.1)
    assert _reason(found, [Tier.SSD] * 32) is Reason.RECOMPUTE_FASTER


def test_nothing_is_kept_before_anything_was_learned() -> None:
    assert _appraiser().speeds() is None


def test_a_save_costs_a_part_of_its_copy_over_the_computing_that_it_spares() -> None:
    found = _learned()
    assert found.save_ratio() == 0.0
    found.copied(100 * BLOCK_BYTES, 100 * 8e-4)
    assert found.save_ratio() == pytest.approx(0.2 * 8e-4 / (16e-3 - 8e-4), rel=0.15)


def _stalled_copies(found: Appraiser) -> None:
    for _ in range(8):
        found.copied(BLOCK_BYTES, 2.0)


def _costly_loads(found: Appraiser) -> None:
    for _ in range(40):
        found.overhead.observe(1, 5.0)


@pytest.mark.parametrize("spoil", [_stalled_copies, _costly_loads])
def test_what_only_loads_can_teach_is_learned_again_from_probes(
    spoil: Callable[[Appraiser], None],
) -> None:
    """A stall of the machine made loads look hopeless: without loads, nothing could refute it."""
    found, match = _learned(), Match((Tier.DRAM,) * 32)
    found.copied(BLOCK_BYTES, 1e-4)
    spoil(found)
    now_s, loaded = 100.0, 0
    for _ in range(200):
        decision = found.plan(match, prompt_tokens=1000, computed_tokens=0).decision
        if decision.load_blocks:
            break
        probe = found.probe(match, decision, now_s)
        if probe is not None:
            loaded += probe.appraisal.decision.load_blocks
            assert probe.appraisal.decision.reason is Reason.PROBE
            assert not probe.wished_blocks
            found.copied(2 * BLOCK_BYTES, 2e-4)
            found.overhead.observe(2, 1e-3)
        now_s += 1.0
    assert decision.reason is Reason.LOAD_ALL
    assert 2 <= loaded <= 80  # 2 blocks in 5 s at most


def test_a_probe_brings_blocks_from_below_up_and_loads_what_is_there() -> None:
    found = _learned()
    _read(found, 10.0)
    match = Match((Tier.DRAM, Tier.SSD, Tier.SSD))
    slow = LoadDecision(0, 0, 3, 0.0, 1.0, 1.0, 0.0, Reason.BELOW_FLOOR)
    probe = found.probe(match, slow, 0.0)
    assert probe is not None
    assert (probe.appraisal.decision.load_blocks, probe.wished_blocks) == (1, 2)
    assert not probe.appraisal.behind(0, 1e9)
    assert found.probe(match, slow, 4.9) is None
    below = found.probe(Match((Tier.SSD,) * 3), slow, 5.0)
    assert below is not None
    assert (below.appraisal.decision.load_blocks, below.wished_blocks) == (0, 2)


def test_a_match_that_no_path_leads_to_is_not_probed() -> None:
    nothing = LoadDecision(0, 0, 1, 0.0, 1.0, 1.0, 0.0, Reason.NO_PATH)
    assert _learned().probe(Match((Tier.SSD,)), nothing, 0.0) is None


def test_prefill_times_are_not_told_before_a_pass_was_seen() -> None:
    assert _appraiser().prefill is None
    found = _learned().prefill
    assert found is not None
    assert found.prefill_s(500, 0) == pytest.approx(TRUE.prefill_s(500, 0), rel=0.05)


def test_a_load_from_a_slow_tier_takes_as_long_as_it_was_seen_to() -> None:
    appraiser = _learned()
    assert appraiser.load_s([]) == 0
    assert appraiser.load_s([Tier.DRAM] * 10) < 0.01
    _read(appraiser, block_s=0.1)
    slow = appraiser.load_s([Tier.SSD, Tier.DRAM, Tier.SSD])
    assert slow == pytest.approx(0.2, rel=0.2)
    assert appraiser.load_s([Tier.SSD] * 4) == pytest.approx(2 * slow, rel=0.2)


def test_where_nothing_is_planned_prefill_times_decide_nothing() -> None:
    """A blend that is told to happen must not depend on how fast the machine is that day."""
    assert _learned().prefill is not None
    assert _learned(planned=False).prefill is None
