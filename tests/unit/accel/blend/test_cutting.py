"""Where sequences are cut: a matter of their content, with promises about distances."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.accel.blend.cutting import Cutter, as_tokens

TOKENS = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 2), max_size=120)
CUTTERS = st.builds(Cutter, st.integers(1, 20), st.integers(1, 20))


def arr(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.uint32)


@given(tokens=TOKENS, cutter=CUTTERS, seed=st.integers(0, 2**64 - 1))
def test_marks_are_the_least_of_a_neighbourhood_of_equal_windows(
    tokens: list[int], cutter: Cutter, seed: int
) -> None:
    """Against the definition, written down plainly."""
    marks = cutter(arr(tokens), seed)
    window = cutter.window_tokens
    count = max(0, len(tokens) - window + 1)
    whole = Cutter(window, 1)(arr(tokens), seed)  # each window by itself: every one is marked
    assert whole.ends.tolist() == [i + window - 1 for i in range(count)]
    hashes = whole.fingerprints.tolist()
    apart = min(cutter.apart_tokens, count)
    expected = {
        j
        for i in range(count - apart + 1 if count else 0)
        for j in range(i, i + apart)
        if hashes[j] == min(hashes[i : i + apart])
    }
    assert marks.ends.tolist() == [j + window - 1 for j in sorted(expected)]
    assert marks.fingerprints.tolist() == [hashes[j] for j in sorted(expected)]


@given(tokens=TOKENS, window=st.integers(1, 33), seed=st.integers(0, 2**64 - 1))
def test_equal_windows_and_only_those_have_equal_fingerprints(
    tokens: list[int], window: int, seed: int
) -> None:
    found = Cutter(window, 1)(arr(tokens), seed).fingerprints.tolist()
    windows = [tuple(tokens[i : i + window]) for i in range(len(found))]
    assert len(set(zip(windows, found, strict=True))) == len(set(windows)) == len(set(found))


@given(
    passage=st.lists(st.integers(0, 1000), min_size=40, max_size=80),
    before=st.lists(st.integers(0, 1000), max_size=60),
    behind=st.lists(st.integers(0, 1000), max_size=60),
)
def test_a_passage_is_cut_the_same_way_wherever_it_stands(
    passage: list[int], before: list[int], behind: list[int]
) -> None:
    cutter = Cutter(8, 9)
    inside = len(passage) - cutter.context_tokens
    alone = cutter(arr(passage), 7)
    placed = cutter(arr([*before, *passage, *behind]), 7)
    first, last = cutter.context_tokens, inside  # where all that decides lies in the passage

    def within(ends: list[int]) -> list[int]:
        return [end for end in ends if first <= end < last]

    assert within([end - len(before) for end in placed.ends.tolist()]) == within(
        alone.ends.tolist()
    )
    shared = set(alone.fingerprints.tolist()) & set(placed.fingerprints.tolist())
    assert shared, "a passage of certain_tokens has no mark in common with itself"


def test_marks_are_apart_as_promised() -> None:
    tokens = np.random.default_rng(5).integers(0, 50_000, 100_000).astype(np.uint32)
    cutter = Cutter(16, 17)
    gaps = np.diff(cutter(tokens, 1).ends)
    assert gaps.max() <= 17
    assert gaps.mean() == pytest.approx(9, rel=0.02)


def test_another_seed_marks_other_places_with_other_fingerprints() -> None:
    tokens = np.arange(5000, dtype=np.uint32)
    one, two = Cutter()(tokens, 1), Cutter()(tokens, 2)
    assert not set(one.fingerprints.tolist()) & set(two.fingerprints.tolist())
    assert one.ends.tolist() != two.ends.tolist()


def test_short_sequences_have_a_mark_if_they_have_a_window() -> None:
    assert len(Cutter(16, 33)(arr(list(range(15))), 1)) == 0
    assert Cutter(16, 33)(arr(list(range(16))), 1).ends.tolist() == [15]
    assert len(Cutter(16, 33)(arr([]), 1)) == 0


def test_a_cutter_without_a_window_or_a_distance_is_refused() -> None:
    for window, apart in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            Cutter(window, apart)


def test_tokens_that_are_no_u32_are_refused() -> None:
    assert as_tokens([1, 2**32 - 1]).tolist() == [1, 2**32 - 1]
    assert as_tokens(()).tolist() == []
    assert as_tokens(range(3)).tolist() == as_tokens(np.arange(3)).tolist() == [0, 1, 2]
    assert as_tokens(np.array([])).tolist() == []
    for bad in ([-1], [2**32], [2**70], np.array([-1]), np.array([2**32])):
        with pytest.raises(OverflowError):
            as_tokens(bad)
    for shape in ([[1, 2]], [0.5], ["a"], b"abcd", 7, np.eye(2), np.array([0.5])):
        with pytest.raises(ValueError, match="flat"):
            as_tokens(shape)
