"""`tiers/warmer.py`: pages are ready ahead of use, and only a bounded stretch of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from kvist.tiers.dram import Arena
from kvist.tiers.warmer import GiveWay, Warmer

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


class Clock:
    """A time that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s


def test_background_work_does_not_wait_for_an_engine_that_is_idle() -> None:
    clock = Clock()
    way = GiveWay(clock=clock, sleep=clock.sleep)
    way.let_through()
    way.begin()
    way.end()
    clock.now_s += 0.11
    at_s = clock.now_s
    way.let_through()
    assert clock.now_s == at_s


def test_it_waits_while_a_step_runs_and_a_moment_longer_but_never_for_long() -> None:
    clock = Clock()
    way = GiveWay(settle_s=0.1, most_s=0.5, clock=clock, sleep=clock.sleep)
    way.begin()
    at_s = clock.now_s
    way.let_through()  # a step that never ends
    assert 0.5 <= clock.now_s - at_s < 0.52
    way.end()
    at_s = clock.now_s
    way.let_through()
    assert 0.1 <= clock.now_s - at_s < 0.12
    at_s = clock.now_s
    way.let_through()
    assert clock.now_s == at_s


def test_the_warmer_gives_way_before_every_step() -> None:
    arena = Arena(32 * MIB, slot_bytes=MIB)
    waits: list[int] = []

    class Watched(GiveWay):
        def let_through(self) -> None:
            waits.append(warmer.warm_bytes)

    warmer = Warmer(arena, lambda: 0, give_way=Watched())
    warmer.start()
    warmer._thread.join(WAIT_S)
    assert waits == [at * MIB for at in range(0, 32, 8)]
    arena.close()
