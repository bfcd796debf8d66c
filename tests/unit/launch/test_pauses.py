"""Pauses before a start grow while it ends at once, and are short again after a good life."""

from __future__ import annotations

from kvist.launch.pauses import Pauses


def test_pauses_grow_to_a_bound_and_begin_anew_after_a_good_life() -> None:
    pauses = Pauses()
    assert [pauses.after(0.5) for _ in range(7)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert pauses.after(3600.0) == 1.0
    assert pauses.after(0.5) == 2.0
