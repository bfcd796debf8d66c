"""`tiers/mapping.py`: aligned shared mappings, and huge pages as a request that may be refused."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvist.tiers import mapping
from kvist.tiers.mapping import HUGE_BYTES, collapse, map_shared, populate

MIB = 1 << 20


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 8 * MIB)
    yield fd
    os.close(fd)


def _mapped(address: int) -> bool:
    starts = (line.split("-")[0] for line in Path("/proc/self/maps").read_text().splitlines())
    return f"{address:x}" in starts


def test_two_mappings_show_the_same_bytes_and_begin_on_a_huge_page(fd: int) -> None:
    one, at = map_shared(fd, 8 * MIB)
    two, other = map_shared(fd, 8 * MIB)
    one[5 * MIB] = 7
    assert two[5 * MIB] == 7
    if HUGE_BYTES:
        assert at % HUGE_BYTES == other % HUGE_BYTES == 0
    assert at != other


def test_memory_is_unmapped_when_its_last_view_dies(fd: int) -> None:
    view, at = map_shared(fd, MIB)
    part = view[:100]
    del view
    gc.collect(0)
    assert _mapped(at)
    part[0] = 1
    del part
    gc.collect(0)
    assert not _mapped(at)


@pytest.mark.parametrize("size", [0, -1, 9 * MIB])
def test_more_than_the_file_has_is_refused(fd: int, size: int) -> None:
    with pytest.raises(ValueError, match="cannot map"):
        map_shared(fd, size)


def test_contents_survive_populate_and_collapse(fd: int) -> None:
    view, at = map_shared(fd, 8 * MIB)
    view[:4] = b"kept"
    view[-4:] = b"too!"
    populate(at, 8 * MIB)
    collapse(at, 8 * MIB)
    assert bytes(view[:4]) == b"kept"
    assert bytes(view[-4:]) == b"too!"
    assert not any(view[4:4096])


def test_a_kernel_that_refuses_is_told_by_the_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "HUGE_BYTES", 2 * MIB)
    assert not collapse(2 * MIB, 8 * MIB)  # nothing is mapped there
    assert not populate(2 * MIB, 8 * MIB)
    monkeypatch.setattr(mapping, "HUGE_BYTES", 0)
    assert not collapse(2 * MIB, 8 * MIB)


def test_what_does_not_fill_a_huge_page_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(mapping, "HUGE_BYTES", 2 * MIB)
    monkeypatch.setattr(mapping, "_advise", lambda at, size, _: asked.append((at, size)) is None)
    assert collapse(3 * MIB, 6 * MIB)
    assert not collapse(3 * MIB, 2 * MIB)
    assert asked == [(4 * MIB, 4 * MIB)]
