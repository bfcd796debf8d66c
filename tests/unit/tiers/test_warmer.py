"""`tiers/warmer.py`: pages are ready ahead of use, and only a bounded stretch of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from kvist.tiers.dram import Arena
from kvist.tiers.warmer import Warmer

MIB = 1 << 20
WAIT_S = 20


def _until(claim: Callable[[], bool]) -> bool:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if claim():
            return True
        time.sleep(0.01)
    return False


def _resident_bytes(arena: Arena) -> int:
    return os.stat(arena.fd).st_blocks * 512


def test_a_stretch_ahead_is_resident_and_no_more() -> None:
    arena = Arena(64 * MIB, slot_bytes=MIB)
    warmer = Warmer(arena, lambda: arena.touched_bytes, ahead_bytes=16 * MIB)
    warmer.start()
    assert _until(lambda: warmer.warm_bytes == 16 * MIB)
    assert _resident_bytes(arena) == 16 * MIB
    for _ in range(8):
        arena.alloc()
    assert _until(lambda: warmer.warm_bytes == 24 * MIB)
    assert _resident_bytes(arena) == 24 * MIB
    warmer.stop(WAIT_S)
    arena.close()


def test_it_ends_by_itself_when_all_is_warm() -> None:
    arena = Arena(8 * MIB, slot_bytes=MIB)
    warmer = Warmer(arena, lambda: 0)
    warmer.start()
    warmer._thread.join(WAIT_S)
    assert not warmer._thread.is_alive()
    assert warmer.warm_bytes == arena.size_bytes
    arena.close()


def test_it_ends_when_the_arena_is_closed() -> None:
    arena = Arena(64 * MIB, slot_bytes=MIB)
    warmer = Warmer(arena, lambda: used[0], ahead_bytes=MIB)
    used = [0]
    warmer.start()
    assert _until(lambda: warmer.warm_bytes >= MIB)
    arena.close()
    used[0] = 32 * MIB
    warmer._thread.join(WAIT_S)
    assert not warmer._thread.is_alive()
