"""A tier that fails, fills up, hangs or misbehaves costs misses, never an error or a hang."""

import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from kvist.core.errors import NoSpaceError, TierError
from kvist.core.keys import Key
from kvist.core.outcome import Outcome
from kvist.store import BreakerState, TieredStore
from kvist.testing.store_suite import WAIT_S, DictTier, content, key, put, ref
from kvist.tiers.protocol import Payload

MakeStore = Callable[..., TieredStore]


def eventually(claim: Callable[[], bool]) -> None:
    """Waits until `claim` holds, as long as it takes on a slow machine."""
    end = time.monotonic() + WAIT_S
    while not claim():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)


def below(tier: DictTier, *numbers: int) -> None:
    for n in numbers:
        tier.blocks[key(n)] = content(key(n))


def test_failing_reads_are_misses_open_the_breaker_and_heal(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store()
    below(tier, *range(6))
    tier.broken = True
    for n in range(6):
        with store.read([key(n)], deadline_s=WAIT_S) as lease:
            assert lease.wait(0) is Outcome.MISS
    stats = store.stats()
    assert stats.breaker_opened >= 1
    assert store.room_blocks() == 8
    tier.broken = False
    eventually(lambda: len(store.match([key(0)])) == 1)

    def heals() -> bool:
        with store.read([key(0)], deadline_s=WAIT_S) as lease:
            return lease.wait(0) is Outcome.HIT

    eventually(heals)
    assert store.stats().lower_read is BreakerState.CLOSED


def test_an_open_read_side_is_absent_for_match_and_write(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store()
    below(tier, 0)
    assert store._link is not None
    store._link.read._probe_s = 1e6
    store._link.read.trip()
    assert len(store.match([key(0)])) == 0
    with store.read([key(0)], deadline_s=WAIT_S) as lease:
        assert lease.outcome(0) is Outcome.MISS
    assert put(store, [0]) == [True]
    assert store.flush(WAIT_S)
    assert store.stats().lower_write is BreakerState.CLOSED


def test_loads_that_wait_behind_a_probe_are_misses(make_store: MakeStore, tier: DictTier) -> None:
    store = make_store(io_threads=1)
    below(tier, *range(4))
    assert store._link is not None
    store._link.read._probe_s = store._link.read._probe_max_s = 1e-6
    store._link.read.trip()
    store._link.read._probe_max_s = store._link.read._delay_s = 1e6
    eventually(store._link.read.peek)
    tier.broken = True
    with store.read([key(n) for n in range(4)], deadline_s=WAIT_S) as lease:
        assert [lease.wait(i) for i in range(4)] == [Outcome.MISS] * 4
    assert tier.reads == [key(0)]
    assert store.stats().load_failed == 4


def test_a_full_tier_is_read_only_for_a_while(make_store: MakeStore, tier: DictTier) -> None:
    store = make_store(blocks=4)
    below(tier, 100)
    tier.full = True
    put(store, range(4))
    eventually(lambda: store.stats().breaker_opened > 0)
    assert store.stats().lower_read is BreakerState.CLOSED
    eventually(lambda: store.room_blocks() == 4)
    with store.read([key(100)], deadline_s=WAIT_S) as lease:
        assert lease.wait(0) is Outcome.HIT
    assert store.stats().evicted_unflushed >= 1
    tier.full = False
    assert store.flush(WAIT_S)
    assert store.stats().lower_write is BreakerState.CLOSED
    assert store.stats().flush_failed >= 4


def test_blocks_stored_before_a_put_failed_count_as_flushed(
    make_store: MakeStore, tier: DictTier
) -> None:
    class HalfFull(DictTier):
        def put(self, payloads: Sequence[Payload]) -> None:
            super().put(payloads[:1])
            if len(payloads) > 1:
                raise TierError("put: broke in the middle")

    half = HalfFull()
    store = make_store(lower=half)
    put(store, range(4))
    assert store.flush(WAIT_S)
    assert set(half.blocks) == {key(n) for n in range(4)}


def test_close_does_not_wait_for_a_failing_tier(make_store: MakeStore, tier: DictTier) -> None:
    store = make_store()
    tier.broken = True
    put(store, range(3))
    eventually(lambda: store.stats().breaker_opened > 0)
    store.close(deadline_s=WAIT_S)
    assert tier.closed


def test_a_hung_tier_costs_a_deadline_and_then_nothing(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store(stuck_s=0.05, io_threads=2)
    below(tier, *range(4))
    put(store, [10])
    assert store.flush(WAIT_S)
    tier.open.clear()
    with store.read([key(n) for n in range(4)], deadline_s=0.1) as lease:
        assert tier.hanging.acquire(timeout=WAIT_S)
        assert tier.hanging.acquire(timeout=WAIT_S)
        assert [lease.wait(i) for i in range(4)] == [Outcome.MISS] * 4
    eventually(lambda: store.stats().lower_stalled)
    assert len(store.match([key(0)])) == 0
    assert len(store.match([key(10)])) == 1
    with store.read([key(2), key(10)], deadline_s=WAIT_S) as lease:
        assert [lease.outcome(0), lease.outcome(1)] == [Outcome.MISS, Outcome.HIT]
    assert put(store, [11]) == [True]
    assert tier.hanging.acquire(timeout=WAIT_S)  # now the writer hangs as well
    assert put(store, [12]) == [True]
    eventually(lambda: store.room_blocks() == 5)  # 2 loads and 1 put are stuck on their slots
    assert put(store, [20, 21, 22, 23, 24]) == [True] * 5
    store.check_integrity()
    store.close(deadline_s=0.05)
    assert not tier.closed
    tier.open.set()


def test_a_tier_that_answers_again_counts_again(make_store: MakeStore, tier: DictTier) -> None:
    store = make_store(stuck_s=0.05, io_threads=1)
    below(tier, 0)
    tier.open.clear()
    with store.read([key(0)], deadline_s=0) as lease:
        assert tier.hanging.acquire(timeout=WAIT_S)
        assert lease.wait(0) is Outcome.MISS
    eventually(lambda: store.stats().lower_stalled)
    tier.open.set()
    eventually(lambda: not store.stats().lower_stalled)
    with store.read([key(0)], deadline_s=WAIT_S) as lease:
        assert lease.wait(0) is Outcome.HIT


def test_close_fails_queued_loads_of_leases_that_are_out(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store(io_threads=1)
    below(tier, 0, 1)
    tier.open.clear()
    with store.read([key(0), key(1)], deadline_s=WAIT_S) as lease:
        assert tier.hanging.acquire(timeout=WAIT_S)
        store.close(deadline_s=0.05)
        assert lease.wait(1) is Outcome.MISS
        tier.open.set()
        lease.wait(0)


def test_a_tier_that_fails_to_forget_says_so(make_store: MakeStore, tier: DictTier) -> None:
    store = make_store()
    put(store, [0])
    assert store.flush(WAIT_S)
    tier.broken = True
    with pytest.raises(TierError):
        store.evict([key(0)])
    with pytest.raises(TierError):
        store.clear()
    assert store.stats().dram_blocks == 0


def test_a_tier_that_cannot_forget_what_was_cleared_on_its_way_is_tolerated(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store()
    tier.open.clear()
    put(store, [0])
    assert tier.hanging.acquire(timeout=WAIT_S)
    store.clear()
    tier.broken = True
    tier.open.set()
    eventually(lambda: store.stats().free_blocks == 8)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_tier_with_a_defect_loses_its_threads_not_the_store(make_store: MakeStore) -> None:
    class Defective(DictTier):
        def read_into(self, key: Key, out: memoryview) -> Outcome:
            raise ZeroDivisionError

        def put(self, payloads: Sequence[Payload]) -> None:
            raise ZeroDivisionError

    tier = Defective()
    below(tier, 0)
    store = make_store(blocks=2, lower=tier, io_threads=1)
    with store.read([key(0)], deadline_s=WAIT_S) as lease:
        assert lease.wait(0) is Outcome.MISS
    assert len(store.match([key(0)])) == 0
    put(store, [5])
    eventually(lambda: store.room_blocks() == 2)
    store.check_integrity()


def test_eight_threads_leave_a_sound_store(make_store: MakeStore, tier: DictTier) -> None:
    store = make_store(blocks=24, stuck_s=5)
    stop = time.monotonic() + 2
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < stop:
            start = rng.randrange(60)
            numbers = range(start, start + rng.randrange(1, 5))
            action = rng.randrange(20)
            try:
                if action < 8:
                    put(store, numbers)
                elif action < 16:
                    keys = [key(n) for n in numbers]
                    with store.read(keys, deadline_s=rng.choice([0, 0.01, 5])) as lease:
                        for i in range(rng.randrange(len(keys) + 1)):
                            hit = lease.wait(i) is Outcome.HIT
                            if hit and bytes(lease.buffer(i)) != content(keys[i]):
                                wrong.append(f"wrong bytes of {numbers[i]}")
                elif action == 16:
                    store.evict([key(n) for n in numbers])
                elif action == 17:
                    store.write([ref(n) for n in numbers]).release()
                elif action == 18:
                    store.check_integrity()
                elif rng.random() < 0.1:
                    store.clear()
                else:
                    tier.broken = rng.random() < 0.2
            except (NoSpaceError, TierError):
                continue

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong
    tier.broken = False
    assert store.flush(WAIT_S)
    store.check_integrity()
    stats = store.stats()
    assert (stats.leased_blocks, stats.leases, stats.writing_blocks) == (0, 0, 0)
    assert stats.committed > 0
    assert stats.loaded > 0
