"""The index of cached text: both implementations against each other, step by step."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.accel.blend.cutting import Cutter, Marks
from kvist.native import chain_keys, digest, span_twin

BLOCK = 3
SCOPES = (b"a" * 16, b"b" * 16)
CUT = Cutter(3, 3)


def new_table(native: ModuleType, *sizes: int) -> Any:
    if native.__name__.endswith("twin"):
        return span_twin.SpanTable(*sizes)
    return native.SpanTable(*sizes)


def arr(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.uint32)


def coarse(tokens: list[int]) -> Marks:
    """Marks with few different fingerprints: nearly all of them collide."""
    marks = CUT(arr(tokens), 5)
    return Marks(marks.ends, marks.fingerprints % np.uint64(5))


def state(table: Any) -> tuple[int, ...]:
    return (len(table), table.marks, table.evicted_blocks, table.crowded_marks)


TEXTS = st.lists(st.integers(0, 2), max_size=30)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "inner", "stray", "lie", "drop", "clear"]),
        TEXTS,
        st.integers(0, 30),
        st.integers(0, 1),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, most=st.integers(1, 25), owners=st.integers(1, 4), collide=st.booleans())
def test_table_agrees_with_the_twin(
    native: ModuleType, steps: list[Any], most: int, owners: int, collide: bool
) -> None:
    table, model = new_table(native, BLOCK, most, owners), span_twin.SpanTable(BLOCK, most, owners)
    names: list[bytes] = []
    cut = coarse if collide else lambda tokens: CUT(arr(tokens), 5)
    for what, tokens, n, which in steps:
        scope = SCOPES[which]
        keys = chain_keys(digest(scope), tokens, BLOCK)
        text = arr(tokens)[: len(keys) * BLOCK]
        first, parent = 0, None
        if what == "inner" and keys:  # from some block on, its marks partly in those before
            first = n % len(keys)
            parent = keys[first - 1] if first else None
        elif what == "stray" and names:  # behind a block that it does not follow
            first, parent = n % 4, names[n % len(names)]
        elif what == "lie":
            first = n % 3
        names += keys
        if what == "drop":
            some = [*names[n : n + 5], b"\0" * 32]
            assert table.drop(some) == model.drop(some)
        elif what == "clear":
            table.clear()
            model.clear()
        else:
            marks = cut(tokens)
            given_keys = keys[first:] if what == "inner" else keys
            given_text = text[len(text) - len(given_keys) * BLOCK :]
            ends = marks.ends - (first * BLOCK if what in ("inner", "stray") else 0)
            blocks = (given_keys, given_text, first, scope, parent)
            assert table.known(*blocks) == model.known(*blocks)
            put = (*blocks, ends, marks.fingerprints)
            assert table.put(*put) == model.put(*put)
        assert state(table) == state(model)
        for place in SCOPES:
            for name in keys[-1:]:
                assert table.tail(name, place, 7) == model.tail(name, place, 7)
            marks = cut(tokens)
            asked = (arr(tokens), marks.ends, marks.fingerprints, place, 1 + n % 5, 1 + n % 3)
            assert table.find(*asked, 500) == model.find(*asked, 500)
            assert table.find(*asked, 20) == model.find(*asked, 20)
    assert table.curtailed_lookups == model.curtailed_lookups


def test_more_blocks_than_a_chunk_come_and_go(native: ModuleType) -> None:
    """Numbers of freed blocks are given again, arrays grow and shrink, nothing is mixed up."""
    table = new_table(native, BLOCK, 100_000, 4)
    text = np.random.default_rng(1).integers(0, 2**32, 15_000).astype(np.uint32)
    keys = chain_keys(digest(b"x"), text, BLOCK)
    marks = CUT(text, 5)
    put = (keys, text, 0, SCOPES[0], None, marks.ends, marks.fingerprints)
    for _ in range(3):
        assert table.put(*put) == 5000
        assert table.put(*put) == 0
        (found,) = table.find(text, marks.ends, marks.fingerprints, SCOPES[0], 3, 4, 10**6)
        assert found == (0, 15_000, 0, tuple(keys))
        assert table.drop(keys[::2]) == 2500
        found = table.find(text, marks.ends, marks.fingerprints, SCOPES[0], 3, 4, 10**6)
        assert all(len(held) == 1 for *_, held in found)
        assert {held[0] for *_, held in found} <= set(keys[1::2])
        assert table.drop(keys) == 2500
        assert (len(table), table.marks) == (0, 0)


def test_calls_that_do_not_fit_are_refused_and_change_nothing(native: ModuleType) -> None:
    table = new_table(native, BLOCK, 10, 2)
    key, text = digest(b"k"), arr([1, 2, 3])
    ends, prints = np.array([2]), np.array([9], np.uint64)
    scope = SCOPES[0]
    for put, complaint in (
        (([b"short"], text, 0, scope, None, ends, prints), "key is 32"),
        (([key], text, 0, scope, b"short", ends, prints), "key is 32"),
        (([key], text, 0, b"short", None, ends, prints), "scope is 16"),
        (([key], text[:2], 0, scope, None, ends, prints), "do not fit"),
        (([key], text, 0, scope, None, ends[:0], prints), "do not fit"),
        (([key, key], arr([1] * 6), 0, scope, None, ends, prints), "twice"),
    ):
        with pytest.raises(ValueError, match=complaint):
            table.put(*put)
    with pytest.raises(ValueError, match="do not fit"):
        table.known([key], text[:2], 0, scope, None)
    with pytest.raises(ValueError, match="do not fit"):
        table.find(text, ends, prints[:0], scope, 1, 1, 10)
    for outside in (np.array([3]), np.array([-1])):
        with pytest.raises(ValueError, match="outside"):
            table.find(text, outside, prints, scope, 1, 1, 10)
    for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            new_table(native, *sizes)
    assert (len(table), table.marks) == (0, 0)
    assert table.put([key], text, 0, scope, None, ends, prints) == 1
    assert table.find(text, ends, prints, scope, 1, 1, 10) == [(0, 3, 0, (key,))]
