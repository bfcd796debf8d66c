"""How far readers get along a prefix: both implementations against counting key by key."""

from __future__ import annotations

import threading
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from owner_doubles import KEYS, NOBODY, new_table, readers

LEVELS = [1, 3, 7]
PAIRS = [(0, NOBODY), (NOBODY, 3), (1, 3), (2, 2), (NOBODY, NOBODY), (9, 1)]


def _counted(facts: set[tuple[bytes, int, int]], keys: list[bytes]) -> list[tuple[int, ...]]:
    """Runs of every pair at every level, those with none left out."""
    found = []
    for row, sources in enumerate(PAIRS):
        runs = []
        for level in LEVELS:
            run = 0
            for key in keys:
                if not any((key, s, b) in facts for s in sources for b in (1, 2, 4) if b & level):
                    break
                run += 1
            runs.append(run)
        if any(runs):
            found.append((row, *runs))
    return found


@settings(max_examples=200)
@given(
    stored=st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 7), st.integers(0, 23), st.integers(1, 12)),
        max_size=25,
    ),
    asked=st.permutations(range(24)).map(lambda order: order[:4]),
)
def test_every_reader_gets_what_counting_gives(
    native: ModuleType, stored: list[tuple[int, int, int, int]], asked: list[int]
) -> None:
    table, facts = new_table(native), set[tuple[bytes, int, int]]()
    for source, tiers, first, count in stored:
        part = KEYS[first : first + count]
        table.add(source, tiers, part)
        facts |= {(key, source, bit) for key in part for bit in (1, 2, 4) if tiers & bit}
    requests = [KEYS, KEYS[3:], [KEYS[n] for n in asked], []]
    want = [_counted(facts, keys) for keys in requests]
    assert [table.reach(keys, readers(*PAIRS), LEVELS) for keys in requests] == want
    assert table.reach_many(requests, readers(*PAIRS), LEVELS) == want


def test_hole_ends_a_run_though_later_blocks_are_there(native: ModuleType) -> None:
    table = new_table(native)
    table.add(0, 1, KEYS)
    table.remove(0, 1, [KEYS[7]])
    assert table.reach(KEYS, readers((0, NOBODY)), [1]) == [(0, 7)]
    table.add(1, 2, [KEYS[7]])
    assert table.reach(KEYS, readers((0, NOBODY), (0, 1)), [1, 3]) == [(0, 7, 7), (1, 7, 24)]


def test_runs_count_what_is_in_the_tiers_that_are_asked_for(native: ModuleType) -> None:
    table = new_table(native)
    table.add(0, 1, KEYS)
    table.add(1, 2, KEYS[:5])
    assert table.runs(KEYS) == [(0, 24), (1, 5)]
    assert table.runs(KEYS, 2) == [(1, 5)]
    with pytest.raises(ValueError, match="at least one"):
        table.runs(KEYS, 0)


def test_nobody_has_anything_where_there_are_no_readers(native: ModuleType) -> None:
    table = new_table(native)
    table.add(0, 1, KEYS)
    assert table.reach(KEYS, readers(), [1]) == []
    assert table.reach_many([], readers((0, 0)), [1]) == []


@pytest.mark.parametrize("levels", [[], [1] * 9])
def test_levels_are_one_to_eight(native: ModuleType, levels: list[int]) -> None:
    with pytest.raises(ValueError, match="levels are 1 to 8"):
        new_table(native).reach(KEYS, readers((0, 0)), levels)


def test_key_that_is_none_is_refused_before_anything_is_answered(native: ModuleType) -> None:
    table = new_table(native)
    table.add(0, 1, KEYS)
    for ask in (table.reach, lambda keys, *rest: table.reach_many([keys], *rest)):
        with pytest.raises(ValueError, match="key is 16 bytes"):
            ask([KEYS[0], b"short"], readers((0, 0)), [1])


def test_events_and_matches_of_several_threads_leave_what_was_told() -> None:
    """The native table has a lock of its own: walks without the GIL beside events with it."""
    native = pytest.importorskip("kvist.native._core")
    table, wrong = new_table(native), []

    def walk() -> None:
        for _ in range(300):
            (found,) = table.reach_many([KEYS], readers((0, NOBODY), (1, NOBODY)), [1])
            if (0, 24) not in found:
                wrong.append(found)

    table.add(0, 1, KEYS)
    threads = [threading.Thread(target=walk) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        table.add(1, 1, KEYS[5:])
        table.remove(1, 1, KEYS[9:])
        table.fade(2)
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert table.runs(KEYS[5:]) == [(0, 19), (1, 4)]
