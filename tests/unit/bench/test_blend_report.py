"""Means over prompts, the share of naive's KL that is removed, and whether it falls."""

from __future__ import annotations

import pytest

from kvist.bench.blend.quality import Measured, PromptRow
from kvist.bench.blend.report import Curve, curve, table


def _row(name: str, **kl: float) -> PromptRow:
    ratios = {
        ratio: Measured(value, 2 * value, value < 0.1, 0.0, 0, 0.5 + float(ratio))
        for ratio, value in kl.items()
    }
    return PromptRow(name, 100, 80, 10, 2.0, ratios)


def _curve(*values: dict[str, float]) -> Curve:
    return curve([_row(str(i), **kl) for i, kl in enumerate(values)])


def test_removed_is_of_all_prompts_kl_together() -> None:
    found = _curve({"0": 0.1, "0.15": 0.1, "1": 0.0}, {"0": 0.9, "0.15": 0.1, "1": 0.0})
    assert [row.ratio for row in found.rows] == ["0", "0.15", "1"]
    naive, some, whole = found.rows
    assert naive.kl_last == pytest.approx(0.5)
    assert naive.removed_last_ratio == 0
    assert some.removed_last_ratio == pytest.approx(0.8)  # not the mean of 0 and 0.89
    assert some.removed_question_low <= some.removed_question_ratio <= some.removed_question_high
    assert whole.removed_question_ratio == 1
    assert some.time_ratio == pytest.approx(0.65 / 1.5)
    assert found.falls_last


def test_a_curve_that_rises_says_so() -> None:
    found = _curve({"0": 0.3, "0.15": 0.1, "0.3": 0.2, "1": 0.0})
    assert not found.falls_last
    assert not found.falls_question


def test_the_table_names_naive_concatenation_and_the_prefix() -> None:
    text = table(_curve({"0": 0.3, "0.15": 0.1}))
    assert "| nothing (naive) | 0.3000 | 0%" in text
    assert "| 15% | 0.1000 | 67%" in text
    assert "80% of them cached" in text
    assert "prefix alone finds 10% of them" in text
