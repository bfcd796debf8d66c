"""Overlaps are resolved after the load: nothing that was loaded is wasted, nothing used twice."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvist.accel.blend.choice import choose, loaded_parts
from kvist.accel.blend.spans import FoundSpan

BLOCK = 4


def span(start: int, stop: int, source_start: int | None = None, name: int = 0) -> FoundSpan:
    source = start if source_start is None else source_start
    first, last = source // BLOCK, (source + stop - start - 1) // BLOCK
    keys = tuple(b"%d.%d" % (name, n) for n in range(first, last + 1))
    return FoundSpan(start, stop, source, keys, BLOCK)


def ranges(spans: list[FoundSpan]) -> list[tuple[int, int]]:
    return [(each.start, each.stop) for each in spans]


SPANS = st.lists(
    st.builds(
        lambda start, length, source, name: span(start, start + length, source, name),
        st.integers(0, 60),
        st.integers(1, 40),
        st.integers(0, 50),
        st.integers(0, 3),
    ),
    max_size=12,
)


def test_the_longest_is_taken_first_and_the_rest_of_the_others_is_used() -> None:
    found = choose([span(0, 30), span(20, 60, 3), span(50, 70, 9)], least_tokens=5)
    assert ranges(found) == [(0, 20), (20, 60), (60, 70)]
    assert [each.source_start for each in found] == [0, 3, 19]


def test_a_remainder_that_is_too_short_is_not_used() -> None:
    assert ranges(choose([span(0, 30), span(26, 60)], least_tokens=27)) == [(26, 60)]
    assert ranges(choose([span(0, 30), span(26, 60)], least_tokens=26)) == [(0, 26), (26, 60)]


def test_a_span_across_a_chosen_one_is_used_on_both_sides() -> None:
    found = choose([span(10, 40, 0, 1), span(0, 29, 50, 2), span(30, 55, 80, 3)], least_tokens=4)
    assert ranges(found) == [(0, 10), (10, 40), (40, 55)]


def test_prefix_comes_first() -> None:
    assert ranges(choose([span(0, 50), span(60, 90)], prefix_tokens=32)) == [(32, 50), (60, 90)]
    assert choose([span(0, 50)], prefix_tokens=48) == []
    assert choose([span(0, 50)], prefix_tokens=64) == []


def test_of_equal_candidates_the_one_that_moves_least_is_taken() -> None:
    one, two = span(40, 60, 0, 1), span(40, 60, 38, 2)
    assert choose([one, two]) == choose([two, one]) == [two]
    assert choose([two, two]) == [two]


@given(spans=SPANS, least=st.integers(1, 10), prefix=st.integers(0, 50), data=st.data())
def test_what_is_chosen_is_disjoint_ordered_and_a_part_of_a_candidate(
    spans: list[FoundSpan], least: int, prefix: int, data: st.DataObject
) -> None:
    chosen = choose(spans, prefix_tokens=prefix, least_tokens=least)
    for one, two in itertools.pairwise(chosen):
        assert one.stop <= two.start
    for each in chosen:
        assert each.start >= prefix
        assert each.tokens >= least
        assert any(
            whole.start <= each.start
            and each.stop <= whole.stop
            and whole.part(each.start, each.stop) == each
            for whole in spans
        )
    shuffled = data.draw(st.permutations(spans))
    assert choose(shuffled, prefix_tokens=prefix, least_tokens=least) == chosen


@given(spans=SPANS, prefix=st.integers(0, 50))
def test_without_a_least_length_all_that_was_loaded_is_covered(
    spans: list[FoundSpan], prefix: int
) -> None:
    def covered(found: list[FoundSpan]) -> set[int]:
        return {at for each in found for at in range(max(each.start, prefix), each.stop)}

    assert covered(choose(spans, prefix_tokens=prefix, least_tokens=1)) == covered(spans)


def test_a_span_of_which_a_block_is_missing_falls_apart() -> None:
    whole = span(100, 120, 6)  # rows 6..25: blocks 1..6
    assert whole.keys == (b"0.1", b"0.2", b"0.3", b"0.4", b"0.5", b"0.6")
    assert list(loaded_parts(whole, set(whole.keys))) == [whole]
    parts = list(loaded_parts(whole, {b"0.1", b"0.3", b"0.4", b"0.6"}))
    assert ranges(parts) == [(100, 102), (106, 114), (118, 120)]
    assert [part.keys for part in parts] == [(b"0.1",), (b"0.3", b"0.4"), (b"0.6",)]
    assert list(loaded_parts(whole, set())) == []


@given(spans=SPANS, loaded=st.sets(st.integers(0, 25)))
def test_loaded_parts_are_made_of_loaded_blocks_and_miss_none(
    spans: list[FoundSpan], loaded: set[int]
) -> None:
    for whole in spans:
        keys = {key for key in whole.keys if int(key.split(b".")[1]) in loaded}
        parts = list(loaded_parts(whole, keys))
        assert all(set(part.keys) <= keys for part in parts)
        there = [
            at
            for at in range(whole.start, whole.stop)
            if (at - whole.start + whole.source_start) // BLOCK in loaded
        ]
        assert [at for part in parts for at in range(part.start, part.stop)] == there
