"""A small store over a tier that fails on demand, checked for leaks after every test."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvist.policy import LeafLru
from kvist.store import Breaker, TieredStore
from kvist.testing.store_suite import RAW_BYTES, WAIT_S, DictTier
from kvist.tiers.dram import PAGE_BYTES, Arena

MakeStore = Callable[..., TieredStore]


def fast_breaker() -> Breaker:
    return Breaker(
        clock=time.monotonic, random=lambda: 0.5, threshold=3, probe_s=0.01, probe_max_s=0.05
    )


@pytest.fixture
def tier() -> Iterator[DictTier]:
    tier = DictTier()
    yield tier
    tier.open.set()


class Clock:
    """Time that stands still until a test moves it; the store's threads are told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def eventually() -> Callable[[TieredStore, Callable[[], bool]], None]:
    """Waits until a store's threads have brought something about."""

    def wait(store: TieredStore, holds: Callable[[], bool]) -> None:
        until_s = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < until_s, "it has not come about"
            with store._desk.changed:
                store._desk.write_work.notify_all()
                store._desk.load_work.notify_all()
                store._desk.changed.wait(0.01)

    return wait


@pytest.fixture
def make_store(tier: DictTier) -> Iterator[MakeStore]:
    """Makes stores of `blocks` slots; by default over `tier` with a fast breaker."""
    made: list[TieredStore] = []

    def make(blocks: int = 8, **options: Any) -> TieredStore:
        arena = Arena(blocks * PAGE_BYTES, slot_bytes=RAW_BYTES, fd=options.pop("fd", None))
        lower = options.pop("lower", tier)
        policy = options.pop("policy", LeafLru())
        options.setdefault("breaker", fast_breaker)
        store = TieredStore(arena, policy, lower, raw_bytes=RAW_BYTES, **options)
        made.append(store)
        return store

    before = set(threading.enumerate())
    yield make
    for store in made:
        store.check_integrity()
        tier.open.set()
        store.close()
    left = [t for t in threading.enumerate() if t not in before]
    for thread in left:
        thread.join(5)
    assert not any(thread.is_alive() for thread in left)
