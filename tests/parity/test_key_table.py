"""The index of the segment log: both implementations against a dictionary of highest sequences."""

from __future__ import annotations

import struct
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.native import digest

ENTRY = struct.Struct("<32s32s32sQQQQHHI")
FRAMES_END = 1 << 30


def key(n: int) -> bytes:
    return digest(b"%d" % n)


def new_table(native: ModuleType) -> Any:
    if native.__name__.endswith("twin"):
        from kvist.native.table_twin import KeyTable

        return KeyTable()
    return native.KeyTable()


def entry(n: int, sequence: int, *, kind: int = 1, offset: int = 4096, stored: int = 100) -> bytes:
    return ENTRY.pack(key(n), bytes(32), bytes(32), offset, 100, stored, sequence, kind, 0, 0)


def test_highest_sequence_wins_in_any_order(native: ModuleType) -> None:
    table = new_table(native)
    table.put(key(1), 7, 4096, 10, 10, 5)
    table.put(key(1), 3, 8192, 10, 10, 2)
    assert table.get(key(1)) == (7, 4096, 10, 10, 5)
    table.put(key(1), 8, 12288, 10, 10, 6)
    assert table.get(key(1)) == (8, 12288, 10, 10, 6)
    assert len(table) == 1


def test_tombstone_hides_what_is_older_even_if_that_comes_later(native: ModuleType) -> None:
    table = new_table(native)
    table.put(key(1), 2, 4096, 0, 0, 9, tombstone=True)
    table.put(key(1), 1, 4096, 10, 10, 5)
    assert key(1) not in table
    assert len(table) == 0
    table.settle()
    assert table.get(key(1)) is None
    table.put(key(1), 3, 4096, 10, 10, 10)
    assert key(1) in table


def test_footer_is_added_whole_or_not_at_all(native: ModuleType) -> None:
    table = new_table(native)
    good = entry(1, 11) + entry(2, 12, kind=2) + entry(3, 10)
    assert table.add_footer(good, 4, FRAMES_END) == (10, 12)
    assert len(table) == 2
    bad = [
        entry(5, 20, kind=3),
        entry(5, 20, offset=0),
        entry(5, 20, offset=4097),
        entry(5, 20, offset=FRAMES_END),
        entry(5, 20, stored=FRAMES_END),
        entry(5, 20, stored=2**64 - 1),
        entry(5, 20)[:-1],
    ]
    for damaged in bad:
        with pytest.raises(ValueError, match="footer"):
            table.add_footer(entry(4, 19) + damaged, 5, FRAMES_END)
    assert len(table) == 2
    assert table.add_footer(b"", 6, FRAMES_END) == (0, 0)


def test_run_ends_at_the_first_absent_key(native: ModuleType) -> None:
    table = new_table(native)
    for n in range(100):
        if n != 70:
            table.put(key(n), 1, 4096, 1, 1, n + 1)
    keys = [key(n) for n in range(100)]
    assert table.contains_run(keys) == 70
    assert table.contains_run(tuple(keys[:70])) == 70
    assert table.contains_run(keys[71:]) == 29
    assert table.contains_run([]) == 0
    assert table.contains_run([b"short", *keys]) == 0
    assert table.present(keys) == b"\1" * 70 + b"\0" + b"\1" * 29
    assert table.present([b"short", keys[0]]) == b"\0\1"
    assert table.present([]) == b""


def test_only_current_frames_are_touched_and_dropped(native: ModuleType) -> None:
    table = new_table(native)
    table.put(key(1), 1, 4096, 1, 1, 1)
    table.put(key(2), 1, 8192, 1, 1, 2)
    table.put(key(1), 2, 4096, 1, 1, 3)
    assert not table.touch(key(1), 1)
    assert table.touch(key(1), 3)
    assert table.touch(key(2), 2)
    assert table.hot(1) == [(key(2), (1, 8192, 1, 1, 2))]
    assert not table.drop(key(1), 1)
    assert table.drop_segment(1) == 1
    assert table.hot(2) == [(key(1), (2, 4096, 1, 1, 3))]
    assert table.drop(key(1), 3)
    assert len(table) == 0
    with pytest.raises(ValueError, match="32 bytes"):
        table.put(b"short", 1, 4096, 1, 1, 1)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "tombstone", "erase", "drop_segment", "touch", "settle"]),
        st.integers(0, 40),
        st.integers(0, 4),
    ),
    max_size=300,
)


@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS)
def test_table_agrees_with_the_twin(native: ModuleType, operations: list[Any]) -> None:
    from kvist.native.table_twin import KeyTable

    table, model = new_table(native), KeyTable()
    for sequence, (what, n, segment) in enumerate(operations, start=1):
        for each in (table, model):
            if what in ("put", "tombstone"):
                gone = what == "tombstone"
                each.put(key(n), segment, 4096 * n, n, n, sequence, tombstone=gone)
            elif what == "erase":
                each.erase(key(n))
            elif what == "touch":
                each.touch(key(n), sequence - 1)
            elif what == "drop_segment":
                each.drop_segment(segment)
            else:
                each.settle()
        assert len(table) == len(model)
        assert table.get(key(n)) == model.get(key(n))
    assert [table.get(key(n)) for n in range(41)] == [model.get(key(n)) for n in range(41)]
    assert [sorted(table.hot(s)) for s in range(5)] == [sorted(model.hot(s)) for s in range(5)]


def test_many_keys_take_less_than_200_bytes_each(native: ModuleType) -> None:
    if native.__name__.endswith("twin"):
        pytest.skip("the twin's Python objects take more")
    table = native.KeyTable()
    for n in range(50_000):
        table.put(key(n), n // 1000, 4096, 1, 1, n + 1)
    assert table.memory_bytes < 200 * len(table)
    for segment in range(0, 50, 2):
        assert table.drop_segment(segment) == 1000
    assert all((key(n) in table) == (n // 1000 % 2 == 1) for n in range(50_000))
    table.clear()
    assert len(table) == 0
