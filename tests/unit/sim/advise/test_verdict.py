"""The rules decide by their thresholds and nothing else, each at its edge."""

from __future__ import annotations

import pytest
from deployments import bought, facts

from kvist.sim.advise.advice import Verdict
from kvist.sim.advise.verdict import (
    ELSEWHERE_RATIO,
    LEAST_GAIN_RATIO,
    PREFIX_CAP_RATIO,
    judge,
)
from kvist.sim.advise.worth import ENOUGH_RATIO

_BIT = 1e-6


def _verdict(found: object = None, worth: object = None, hbm: float = 0.1) -> Verdict:
    return judge(found or facts(), worth or bought(), hbm)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ideal", "repeated", "verdict"),
    [
        (PREFIX_CAP_RATIO - _BIT, 0.9, Verdict.NON_PREFIX),
        (PREFIX_CAP_RATIO, 0.9, Verdict.DRAM_SSD),
        (0.31, 0.31 + ELSEWHERE_RATIO + _BIT, Verdict.NON_PREFIX),
        (0.31, 0.31 + ELSEWHERE_RATIO - _BIT, Verdict.DRAM_SSD),
        (0.31, None, Verdict.DRAM_SSD),
    ],
)
def test_non_prefix_needs_a_low_cap_and_repeats_elsewhere(
    ideal: float, repeated: float | None, verdict: Verdict
) -> None:
    found = facts(ideal_hit_ratio=ideal, repeated_tokens_ratio=repeated)
    assert _verdict(found, bought(dram_hit=0.1, ssd_hit=0.3)) is verdict


@pytest.mark.parametrize(
    ("gain", "verdict"),
    [(LEAST_GAIN_RATIO + _BIT, Verdict.DRAM_SSD), (LEAST_GAIN_RATIO - _BIT, Verdict.OFF)],
)
def test_off_below_two_points_over_the_engines_own_cache(gain: float, verdict: Verdict) -> None:
    assert _verdict(worth=bought(dram_hit=0.1, ssd_hit=0.1 + gain)) is verdict


def test_off_where_nothing_is_worth_its_price() -> None:
    nothing = bought(dram_bytes=0, ssd_bytes=0, dram_hit=0.5, ssd_hit=0.5)
    assert _verdict(worth=nothing) is Verdict.OFF


@pytest.mark.parametrize(
    ("reached", "verdict"),
    [(ENOUGH_RATIO + _BIT, Verdict.DRAM), (ENOUGH_RATIO - _BIT, Verdict.DRAM_SSD)],
)
def test_dram_suffices_from_ninety_percent_of_the_ideal(reached: float, verdict: Verdict) -> None:
    worth = bought(dram_hit=0.6 * reached, ssd_hit=0.6)
    assert _verdict(worth=worth) is verdict


def test_dram_is_no_answer_where_none_is_bought() -> None:
    worth = bought(dram_bytes=0, dram_hit=0.55, ssd_hit=0.6)
    assert _verdict(worth=worth, hbm=0.55) is Verdict.DRAM_SSD


def test_dram_alone_where_no_ssd_pays() -> None:
    assert _verdict(worth=bought(ssd_bytes=0, dram_hit=0.3, ssd_hit=0.3)) is Verdict.DRAM


def test_every_verdict_says_its_figures_and_every_rule_its_reason() -> None:
    cases = (
        (facts(), bought(), "stop at 30.0%"),
        (facts(), bought(dram_hit=0.59), "59.0%"),
        (facts(), bought(dram_bytes=0, ssd_bytes=0), "no tier earns its price"),
        (facts(ideal_hit_ratio=0.0), bought(ssd_hit=0.1), "0.0%"),
        (facts(ideal_hit_ratio=0.11), bought(ssd_hit=0.11), "already hits 10.0%"),
        (facts(ideal_hit_ratio=0.3, repeated_tokens_ratio=0.7), bought(), "70.0%"),
        (facts(), bought(lifetime_days=12.0), "up in 12 days"),
    )
    for found, worth, figure in cases:
        _, sentence, rules = judge(found, worth, 0.1)
        assert figure in sentence
        assert len(rules) == 5
        assert all(rule.reason for rule in rules)
