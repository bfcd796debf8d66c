"""The table of owners: both implementations against plain dictionaries, names and prefixes too."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from owner_doubles import KEYS, NOBODY, contents, new_table

from kvist.native import digest

CALLS = st.one_of(
    st.tuples(
        st.sampled_from(("add", "add", "remove")),
        st.integers(0, 4),
        st.integers(1, 3),
        st.lists(st.sampled_from(KEYS), max_size=10),
    ),
    st.tuples(st.just("drop"), st.integers(0, 4)),
    st.tuples(st.just("fade"), st.integers(1, 3)),
)


@settings(max_examples=200)
@given(calls=st.lists(CALLS, max_size=60))
def test_any_calls_leave_what_plain_sets_hold(
    native: ModuleType, calls: list[tuple[Any, ...]]
) -> None:
    table, facts = new_table(native), set[tuple[bytes, int, int]]()
    for name, source, *rest in calls:
        getattr(table, name)(source, *rest)
        if name == "drop":
            facts = {fact for fact in facts if fact[1] != source}
            continue
        if name == "fade":  # its argument is tiers
            facts = {fact for fact in facts if not fact[2] & source}
            continue
        bits, keys = rest
        mine = {(k, source, bit) for k in keys for bit in (1, 2) if bits & bit}
        facts = facts | mine if name == "add" else facts - mine
    want: dict[bytes, dict[int, int]] = {}
    for key, source, bit in facts:
        owners = want.setdefault(key[:16], {})
        owners[source] = owners.get(source, 0) | bit
    assert contents(table) == {tag: sorted(owners.items()) for tag, owners in want.items()}
    assert len(table) == len(want)
    for key in KEYS:
        assert table.find(key) == sorted(want.get(key[:16], {}).items())
    assert table.runs(KEYS) == _runs(want)


def _runs(want: dict[bytes, dict[int, int]]) -> list[tuple[int, int]]:
    found = []
    for source in range(5):
        run = 0
        while run < len(KEYS) and source in want.get(KEYS[run][:16], {}):
            run += 1
        if run:
            found.append((source, run))
    return found


def test_growth_and_shrinkage_keep_every_fact(native: ModuleType) -> None:
    table = new_table(native)
    many = [digest(b"many %d" % n) for n in range(6000)]
    for source in range(3):
        table.add(source, 1, many[source * 1000 :])
    table.drop(0)
    table.remove(2, 1, many[2500:])
    assert len(table) == 5000
    assert table.runs(many[1000:]) == [(1, 5000)]
    assert table.find(many[2200]) == [(1, 1), (2, 1)]
    table.drop(1)
    assert len(table) == 500
    table.drop(2)
    assert (len(table), contents(table)) == (0, {})


def test_source_that_comes_back_after_a_drop_has_only_what_is_new(native: ModuleType) -> None:
    table = new_table(native)
    table.add(1, 1, KEYS)
    table.add(2, 1, KEYS[:3])
    table.drop(1)
    table.add(1, 2, KEYS[2:5])
    assert table.runs(KEYS) == [(2, 3)]
    assert table.find(KEYS[2]) == [(1, 2), (2, 1)]
    assert table.find(KEYS[4]) == [(1, 2)]
    assert len(table) == 5


def test_keys_never_exceed_the_bound(native: ModuleType) -> None:
    table = new_table(native, 100)
    many = [digest(b"many %d" % n) for n in range(1000)]
    for n in range(0, 1000, 10):
        table.add(n % 7, 1, many[n : n + 10])
        assert len(table) <= 100
    assert table.evicted == 900
    assert len(contents(table)) == 100


def test_keys_that_are_looked_up_outlive_others(native: ModuleType) -> None:
    table = new_table(native, 100)
    table.add(0, 1, KEYS[:10])
    for n in range(400):
        table.add(0, 1, [digest(b"once %d" % n)])
        if n % 20 == 0:
            assert table.runs(KEYS[:10]) == [(0, 10)]


def test_memory_counts_what_is_held(native: ModuleType) -> None:
    table = new_table(native)
    empty = table.memory_bytes
    table.add(3, 1, [digest(b"many %d" % n) for n in range(5000)])
    assert table.memory_bytes > empty + 5000 * 16


@pytest.mark.parametrize(
    ("source", "tiers", "keys"),
    [
        (-1, 1, KEYS),
        (NOBODY, 1, KEYS),
        (0, 0, KEYS),
        (0, 1 << 16, KEYS),
        (0, 1, [KEYS[0], b"short"]),
    ],
)
def test_what_is_out_of_range_changes_nothing(
    native: ModuleType, source: int, tiers: int, keys: list[bytes]
) -> None:
    table = new_table(native)
    with pytest.raises(ValueError, match=r"source is below|key is 16 bytes"):
        table.add(source, tiers, keys)
    assert len(table) == 0


@pytest.mark.parametrize(("most_keys", "most_names"), [(0, 1), (1, 0), (1 << 24, 1 << 24)])
def test_bound_below_one_is_refused(native: ModuleType, most_keys: int, most_names: int) -> None:
    with pytest.raises(ValueError, match="are 1 or more"):
        new_table(native, most_keys, most_names)
