"""Verdicts of figures, and how they are written."""

import pytest

from kvist.sim.reproduce.outcome import Claim, Figure, Outcome, Unit, Verdict, around, over_seeds
from kvist.sim.reproduce.page import number, write_section

HELD = Figure("gain", Unit.GAIN, 1.57, 1.41, around(1.57, 0.15))


def _outcome(figure: Figure, *, claim: bool) -> Outcome:
    return Outcome(
        "n", "Title", "Fig. 0", "Setting.", (figure,), (Claim("a > b", claim),), ("Why.",)
    )


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (0.849, Verdict.OUTSIDE),
        (0.85, Verdict.WITHIN),
        (1.15, Verdict.WITHIN),
        (1.151, Verdict.OUTSIDE),
    ],
)
def test_the_edges_of_the_range_are_within(ours: float, verdict: Verdict) -> None:
    assert Figure("x", Unit.RATIO, 1.0, ours, around(1.0, 0.15)).verdict is verdict


def test_a_figure_without_a_range_is_only_reported() -> None:
    assert Figure("x", Unit.RATIO, 1.0, 9.0).verdict is Verdict.NOT_HELD


def test_ours_over_the_papers_is_unknown_where_the_paper_has_none() -> None:
    assert HELD.over_paper == pytest.approx(1.41 / 1.57)
    assert Figure("x", Unit.RATIO, None, 2.0).over_paper is None


def test_an_outcome_holds_if_every_figure_and_every_claim_does() -> None:
    outside = Figure("gain", Unit.GAIN, 1.57, 0.3, around(1.57, 0.15))
    assert _outcome(HELD, claim=True).holds
    assert not _outcome(HELD, claim=False).holds
    assert not _outcome(outside, claim=True).holds


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.412, Unit.SHARE, "41.2 %"),
        (4.98, Unit.GAIN, "+498 %"),
        (3.074, Unit.SECONDS, "3.07 s"),
        (1.429, Unit.RATIO, "1.43x"),
        (float("inf"), Unit.GAIN, "∞"),
    ],
)
def test_figures_are_written_in_their_unit(value: float, unit: Unit, text: str) -> None:
    assert number(value, unit) == text


def test_a_section_says_paper_ours_ratio_range_and_what_does_not_hold() -> None:
    section = write_section(_outcome(HELD, claim=False))
    assert "| gain | +157 % | +141 % | 0.90 | +133 % … +181 % | within |" in section
    assert "**does not hold**: a > b" in section
    assert "* Why." in section


def test_a_figure_of_several_seeds_is_their_mean_with_the_least_and_the_greatest() -> None:
    figure = over_seeds("rejected", Unit.COUNT, 100.0, [80, 110, 95])
    assert (figure.ours, figure.by_seed) == (95.0, (80, 110, 95))
    section = write_section(_outcome(figure, claim=True))
    assert "| rejected | 100 | 95 (80 … 110) | 0.95 | – | reported only |" in section


def test_a_figure_of_one_seed_has_no_spread() -> None:
    figure = over_seeds("goodput", Unit.RATE, None, [6.5])
    assert figure == Figure("goodput", Unit.RATE, None, 6.5)
    assert "| goodput | – | 6.500 /s | – |" in write_section(_outcome(figure, claim=True))


def test_a_figure_needs_a_seed() -> None:
    with pytest.raises(ValueError, match="no seed gave 'goodput'"):
        over_seeds("goodput", Unit.RATE, None, [])
