"""The arena: slots, their addresses, and sharing with another process."""

import ctypes
import os
import stat
import subprocess
import sys

import pytest

from kvist.core.errors import ClosedError, StoreError
from kvist.tiers.dram import PAGE_BYTES, Arena, ArenaMap


def test_slots_are_rounded_up_to_pages_and_aligned() -> None:
    with Arena(10 * PAGE_BYTES, slot_bytes=PAGE_BYTES + 1) as arena:
        assert arena.slot_bytes == 2 * PAGE_BYTES
        assert arena.capacity_slots == 5
        assert arena.address % PAGE_BYTES == 0
        assert arena.offset(3) == 6 * PAGE_BYTES


def test_every_slot_is_given_once_and_then_none() -> None:
    with Arena(4 * PAGE_BYTES, slot_bytes=PAGE_BYTES) as arena:
        assert sorted(arena.alloc() for _ in range(4)) == [0, 1, 2, 3]  # type: ignore[type-var]
        assert arena.alloc() is None
        assert arena.free_slots == 0


def test_the_slot_freed_last_is_taken_first() -> None:
    with Arena(4 * PAGE_BYTES, slot_bytes=PAGE_BYTES) as arena:
        for _ in range(3):
            arena.alloc()
        arena.free(0)
        arena.free(2)
        assert [arena.alloc(), arena.alloc(), arena.alloc()] == [2, 0, 3]
        assert arena.used(3)


@pytest.mark.parametrize("slot", [0, 1, -1, 9])
def test_freeing_what_is_not_allocated_is_refused(slot: int) -> None:
    with Arena(4 * PAGE_BYTES, slot_bytes=PAGE_BYTES) as arena:
        arena.alloc()
        arena.free(0)
        with pytest.raises(StoreError):
            arena.free(slot)


def test_views_of_slots_do_not_overlap() -> None:
    with Arena(3 * PAGE_BYTES, slot_bytes=PAGE_BYTES) as arena:
        for slot in range(3):
            arena.view(slot)[:] = bytes([slot + 1]) * PAGE_BYTES
        assert [bytes(arena.view(s)) for s in range(3)] == [
            bytes([s + 1]) * PAGE_BYTES for s in range(3)
        ]
        at = arena.address + arena.offset(2)
        assert ctypes.string_at(at, 2) == b"\x03\x03"
        for slot in (-1, 3):
            with pytest.raises(IndexError):
                arena.view(slot)


def test_memory_is_only_taken_when_touched_and_is_private_to_the_user() -> None:
    with Arena(1 << 30, slot_bytes=1 << 20) as arena:
        arena.view(0)[0] = 1
        state = os.fstat(arena.fd)
        assert state.st_size == 1 << 30
        assert state.st_blocks * 512 <= 4 << 20  # one huge page at most
        assert stat.S_IMODE(state.st_mode) & 0o077 == 0 or state.st_uid == os.getuid()


def test_another_process_sees_and_changes_the_same_bytes() -> None:
    with Arena(2 * PAGE_BYTES, slot_bytes=PAGE_BYTES) as arena:
        arena.view(1)[:5] = b"hello"
        at = arena.locator()
        program = (
            "from kvist.tiers.dram import Arena\n"
            f"m = Arena.attach({at.path!r}, {at.size_bytes}, slot_bytes={at.slot_bytes})\n"
            "v = m.view(1); assert bytes(v[:5]) == b'hello'; v[:5] = b'world'; m.close()\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
        assert bytes(arena.view(1)[:5]) == b"world"


def test_attach_by_descriptor_leaves_the_descriptor_to_its_owner() -> None:
    with Arena(PAGE_BYTES, slot_bytes=PAGE_BYTES) as arena:
        with Arena.attach(arena.fd, PAGE_BYTES) as other:
            other.view(0)[:2] = b"ok"
        assert bytes(arena.view(0)[:2]) == b"ok"
        os.fstat(arena.fd)


def test_attach_refuses_more_than_there_is_and_leaks_no_descriptor() -> None:
    with Arena(PAGE_BYTES, slot_bytes=PAGE_BYTES) as arena:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ValueError, match="cannot map"):
            Arena.attach(arena.fd, 2 * PAGE_BYTES)
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_view_outlives_close() -> None:
    arena = Arena(PAGE_BYTES, slot_bytes=PAGE_BYTES)
    view = arena.view(0)
    view[:2] = b"ok"
    arena.close()
    arena.close()
    assert bytes(view[:2]) == b"ok"
    assert arena.fd == -1
    with pytest.raises(ClosedError):
        arena.view(0)
    with pytest.raises(ClosedError):
        _ = arena.address


@pytest.mark.parametrize(("capacity", "slot"), [(PAGE_BYTES, 0), (PAGE_BYTES - 1, 1), (0, 1)])
def test_an_arena_without_a_slot_is_refused(capacity: int, slot: int) -> None:
    with pytest.raises(ValueError, match="slot"):
        Arena(capacity, slot_bytes=slot)


def test_memory_that_the_kernel_refuses_leaks_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((OSError, OverflowError)):
        Arena(1 << 62, slot_bytes=1 << 61)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_kernel_without_huge_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvist.tiers.mapping.HUGE_BYTES", 0)
    with Arena(PAGE_BYTES, slot_bytes=PAGE_BYTES) as arena:
        assert isinstance(arena, ArenaMap)
        assert arena.alloc() == 0
