"""Blended pages in the engine's own cache are known again by whoever hits them."""

from __future__ import annotations

from kvist.connectors.vllm.taint import Taint


def test_a_hit_past_the_first_blended_page_is_tainted_from_there() -> None:
    taint = Taint(10)
    taint.add(b"2")
    assert taint.first([b"0", b"1", b"2", b"3"], 4) == 2
    assert taint.first([b"0", b"1", b"2", b"3"], 3) == 2


def test_a_hit_that_ends_before_it_is_clean() -> None:
    taint = Taint(10)
    taint.add(b"2")
    assert taint.first([b"0", b"1", b"2", b"3"], 2) is None
    assert taint.first([b"0", b"1", b"x", b"y"], 4) is None


def test_the_page_used_longest_ago_is_dropped_first() -> None:
    taint = Taint(2)
    taint.add(b"a")
    taint.add(b"b")
    assert taint.first([b"a"], 1) == 0  # used
    taint.add(b"c")
    assert taint.first([b"a"], 1) == 0
    assert taint.first([b"b"], 1) is None
    assert len(taint) == 2
