"""An SSD tier above a remote: which is read, what waits, what a fault of either costs."""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvist.adapters.layers import Blow, BreakerLayer, ChaosLayer
from kvist.adapters.memory import MemoryAdapter, MemoryMedium
from kvist.adapters.protocol import Fetched, NewObject, PutReport, Wanted
from kvist.core.errors import ClosedError, TierError
from kvist.core.outcome import Outcome, Tier
from kvist.policy import LeafLru
from kvist.store import TieredStore
from kvist.testing.store_suite import content, key, ref
from kvist.testing.tier_suite import BLOCK_BYTES, read_block, suite_block, suite_key, suite_payload
from kvist.tiers.dram import Arena
from kvist.tiers.remote import LearnLimits, RemoteTier
from kvist.tiers.ssd import FsyncMode, PosixIo, SsdTier
from kvist.tiers.stacked import StackedTier

KEYSPACE = bytes(32)
WAIT_S = 20.0


class Disk(PosixIo):
    """Fails every transfer while `code` is set."""

    code = 0

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.code:
            raise OSError(self.code, "switched off")
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.code:
            raise OSError(self.code, "switched off")
        return super().preadv(fd, buffers, offset)


class Gated(MemoryAdapter):
    """Puts wait for `gate`."""

    def __init__(self, medium: MemoryMedium) -> None:
        super().__init__(medium)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def put(self, objects: Sequence[NewObject]) -> PutReport:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        return super().put(objects)


class Bench:
    """A stacked tier whose parts can be made to fail, and its medium."""

    def __init__(
        self, root: Path, *, queue_bytes: int = 1 << 20, disk_bytes: int = 64 << 20
    ) -> None:
        self.now = 0.0
        self.medium = MemoryMedium()
        self.disk_io = Disk()
        self.adapter = Gated(self.medium)
        self.chaos = ChaosLayer(self.adapter, seed=1, chances={}, rest=lambda _: None)
        self.breaker = BreakerLayer(self.chaos, failures=3, open_s=1e6, clock=lambda: self.now)
        self.disk = SsdTier.open(
            root / "disk",
            keyspace=KEYSPACE,
            capacity_bytes=64 << 20,
            fsync=FsyncMode.OFF,
            io=self.disk_io,
        )
        self.remote = RemoteTier(
            self.breaker,
            keyspace=KEYSPACE,
            limits=LearnLimits(probe_s=WAIT_S),
            available=self.breaker.passes,
        )
        self.tier = StackedTier(
            self.disk, self.remote, queue_bytes=queue_bytes, clock=lambda: self.now
        )
        assert self.remote.wait_listed(WAIT_S)

    def other_host_stores(self, numbers: Sequence[int]) -> None:
        other = RemoteTier(MemoryAdapter(self.medium), keyspace=KEYSPACE)
        other.put([suite_payload(i) for i in numbers])
        other.close()


@pytest.fixture
def bench(tmp_path: Path):
    bench = Bench(tmp_path)
    yield bench
    bench.adapter.gate.set()
    bench.disk_io.code = 0
    bench.tier.close()


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, "it never happens"
        time.sleep(0.002)


def read_all(tier: StackedTier, numbers: Sequence[int]) -> dict[int, object]:
    """What a batch says of each block; a hit has the right bytes."""
    outs = [bytearray(BLOCK_BYTES) for _ in numbers]
    items = [(suite_key(i), memoryview(o)) for i, o in zip(numbers, outs, strict=True)]
    found: dict[int, object] = {}
    for n, outcome in tier.read_many(items):
        assert numbers[n] not in found
        found[numbers[n]] = outcome
        assert outcome is not Outcome.HIT or outs[n] == suite_block(numbers[n])
    assert len(found) == len(numbers)
    return found


def test_what_is_put_is_on_disk_at_once_and_in_the_remote_soon(bench: Bench) -> None:
    bench.adapter.gate.clear()
    bench.tier.put([suite_payload(i) for i in range(8)])
    assert bench.disk.contains(suite_key(7))
    assert not bench.medium.objects
    bench.adapter.gate.set()
    assert bench.tier.wait_sent(WAIT_S)
    assert len(bench.medium.objects) == 8
    assert bench.tier.stats().sent == 8


def test_payload_may_change_while_its_copy_waits(bench: Bench) -> None:
    bench.adapter.gate.clear()
    data = bytearray(suite_block(1))
    payload = suite_payload(1)
    bench.tier.put([type(payload)(payload.key, None, memoryview(data))])
    data[:] = bytes(BLOCK_BYTES)
    bench.adapter.gate.set()
    assert bench.tier.wait_sent(WAIT_S)
    assert read_block(bench.remote, 1) == suite_block(1)


def test_run_goes_on_from_disk_to_remote_and_back(bench: Bench) -> None:
    bench.tier.put([suite_payload(i) for i in (0, 1, 2, 6, 7)])
    bench.other_host_stores([3, 4, 5, 8, 9])
    keys = [suite_key(i) for i in range(12)]
    assert bench.tier.contains_run(keys) == 10
    tiers = bench.tier.tiers_of(keys[:10])
    here, there = Tier.SSD, Tier.REMOTE
    assert tiers == (here,) * 3 + (there,) * 3 + (here,) * 2 + (there,) * 2
    assert set(read_all(bench.tier, range(10)).values()) == {Outcome.HIT}
    assert read_all(bench.tier, [1, 11, 4]) == {
        1: Outcome.HIT,
        11: Outcome.MISS,
        4: Outcome.HIT,
    }
    totals = bench.tier.read_totals()
    assert totals[Tier.SSD].size_bytes == 6 * BLOCK_BYTES
    assert totals[Tier.REMOTE].size_bytes == 6 * BLOCK_BYTES


def test_block_that_the_disk_lost_comes_from_the_remote(bench: Bench) -> None:
    bench.tier.put([suite_payload(i) for i in range(4)])
    assert bench.tier.wait_sent(WAIT_S)
    for path in bench.disk._directory.glob("*.kvs"):
        data = path.read_bytes()
        at = data.index(suite_block(2)[:64])
        path.write_bytes(data[:at] + b"\xff" * 64 + data[at + 64 :])
    assert set(read_all(bench.tier, range(4)).values()) == {Outcome.HIT}


def test_disk_that_fails_rests_and_the_remote_goes_on(bench: Bench) -> None:
    bench.tier.put([suite_payload(i) for i in range(4)])
    assert bench.tier.wait_sent(WAIT_S)
    bench.disk_io.code = errno.EIO
    assert set(read_all(bench.tier, range(4)).values()) == {Outcome.HIT}
    bench.tier.put([suite_payload(9)])
    assert bench.tier.contains(suite_key(9))
    assert bench.tier.tiers_of([suite_key(0)]) == (Tier.REMOTE,)
    bench.disk_io.code = 0
    bench.now += 60.0
    assert bench.tier.tiers_of([suite_key(0)]) == (Tier.SSD,)
    bench.tier.put([suite_payload(10)])
    assert bench.disk.contains(suite_key(10))


def test_both_failing_is_an_error_that_names_the_disk(bench: Bench) -> None:
    bench.disk_io.code = errno.EIO
    bench.chaos._chances[Blow.ERROR] = 1.0
    with pytest.raises(TierError, match="switched off"):
        bench.tier.put([suite_payload(1)])
    assert not bench.tier.contains(suite_key(1))


def test_remote_that_fails_costs_nothing_but_misses(bench: Bench) -> None:
    bench.other_host_stores(range(100, 104))
    keys = [suite_key(i) for i in range(100, 104)]
    assert bench.tier.contains_run(keys) == 4
    bench.chaos._chances[Blow.ERROR] = 1.0
    bench.tier.put([suite_payload(1)])
    assert read_all(bench.tier, [1, 100, 101]) == {
        1: Outcome.HIT,
        100: Outcome.MISS,
        101: Outcome.MISS,
    }
    until(lambda: bench.tier.stats().failed == 1)
    while bench.breaker.passes():
        read_all(bench.tier, [102])
    assert bench.tier.contains_run(keys) == 0
    bench.tier.put([suite_payload(2)])
    assert bench.tier.stats().refused == 1
    assert read_block(bench.tier, 2) == suite_block(2)


def test_copies_that_wait_stay_under_their_cap_and_parents_come_first(tmp_path: Path) -> None:
    bench = Bench(tmp_path, queue_bytes=4 * BLOCK_BYTES)
    bench.adapter.gate.clear()
    bench.tier.put([suite_payload(0)])
    assert bench.adapter.entered.wait(WAIT_S)
    bench.tier.put([suite_payload(i) for i in range(1, 10)])
    stats = bench.tier.stats()
    assert stats.waiting_bytes <= 4 * BLOCK_BYTES
    assert stats.refused == 6
    bench.adapter.gate.set()
    assert bench.tier.wait_sent(WAIT_S)
    assert [read_block(bench.remote, i) is not None for i in range(6)] == [True] * 4 + [False] * 2
    assert bench.tier.stats().waiting_bytes == 0
    bench.tier.close()


def test_block_removed_while_it_is_sent_does_not_stay_in_the_remote(bench: Bench) -> None:
    bench.adapter.gate.clear()
    bench.tier.put([suite_payload(1)])
    assert bench.adapter.entered.wait(WAIT_S)
    bench.tier.put([suite_payload(2)])
    bench.tier.remove([suite_key(1), suite_key(2)])
    bench.adapter.gate.set()
    assert bench.tier.wait_sent(WAIT_S)
    assert bench.medium.objects == {}
    assert not bench.tier.contains(suite_key(1))


def test_removal_that_the_remote_did_not_take_is_made_up_for(bench: Bench) -> None:
    bench.tier.put([suite_payload(1)])
    assert bench.tier.wait_sent(WAIT_S)
    bench.chaos._chances[Blow.ERROR] = 1.0
    bench.tier.remove([suite_key(1)])
    assert not bench.tier.contains(suite_key(1))
    bench.chaos.heal()
    bench.now += 1e9
    assert bench.tier.wait_sent(WAIT_S)
    assert bench.medium.objects == {}


def test_block_that_is_put_again_is_not_removed_by_an_owed_removal(bench: Bench) -> None:
    """Removals fail for a while, and stores do not."""
    failing = threading.Event()
    delete = bench.adapter.delete

    def refuse(names: Sequence[str]) -> None:
        if failing.is_set():
            raise TierError(errno.EIO, "not now")
        delete(names)

    bench.adapter.delete = refuse  # type: ignore[method-assign]
    bench.breaker._failures = deque(maxlen=10_000)
    bench.tier.put([suite_payload(1)])
    assert bench.tier.wait_sent(WAIT_S)
    failing.set()
    bench.tier.remove([suite_key(1), suite_key(2)])
    bench.tier.put([suite_payload(1)])
    until(lambda: bench.tier.stats().sent == 2)
    failing.clear()
    assert bench.tier.wait_sent(WAIT_S)
    assert read_block(bench.remote, 1) == suite_block(1)


def test_clear_empties_both(bench: Bench) -> None:
    bench.tier.put([suite_payload(i) for i in range(5)])
    assert bench.tier.wait_sent(WAIT_S)
    bench.tier.clear()
    assert bench.tier.contains_run([suite_key(i) for i in range(5)]) == 0
    assert bench.medium.objects == {}
    assert set(read_all(bench.tier, range(5)).values()) == {Outcome.MISS}


def test_close_sends_what_waits_and_is_final(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.tier.put([suite_payload(i) for i in range(20)])
    bench.tier.close()
    bench.tier.close()
    assert len(bench.medium.objects) == 20
    with pytest.raises(ClosedError):
        bench.tier.put([suite_payload(1)])
    with pytest.raises(ClosedError):
        bench.tier.read_many([])
    assert not bench.tier.contains(suite_key(1))


def test_abandoned_batch_lets_go_of_its_buffers(bench: Bench) -> None:
    bench.tier.put([suite_payload(i) for i in range(4)])
    bench.other_host_stores(range(4, 8))
    outs = [bytearray(BLOCK_BYTES) for _ in range(8)]
    reads = bench.tier.read_many([(suite_key(i), memoryview(o)) for i, o in enumerate(outs)])
    next(reads)
    reads.close()  # type: ignore[attr-defined]
    for out in outs:
        out[:] = b"\xee" * BLOCK_BYTES
    time.sleep(0.05)
    assert all(out == b"\xee" * BLOCK_BYTES for out in outs)


def test_store_over_both_says_where_blocks_are(tmp_path: Path) -> None:
    size = 8192
    bench = Bench(tmp_path)
    other = TieredStore(
        Arena(16 * size, slot_bytes=size),
        LeafLru(),
        RemoteTier(MemoryAdapter(bench.medium), keyspace=KEYSPACE),
        raw_bytes=size,
        lower_tier=Tier.REMOTE,
    )
    fill(other, range(4, 8), size)
    assert other.flush(WAIT_S)
    other.close()
    store = TieredStore(Arena(16 * size, slot_bytes=size), LeafLru(), bench.tier, raw_bytes=size)
    fill(store, range(4), size)
    assert store.flush(WAIT_S)
    keys = [key(n) for n in range(9)]
    assert store.match(keys).tiers == (Tier.DRAM,) * 4 + (Tier.REMOTE,) * 4
    assert [info.tier for info in store.stat(key(5))] == [Tier.REMOTE]
    with store.read(keys[:8], deadline_s=WAIT_S) as lease:
        for n in range(8):
            assert lease.wait(n) is Outcome.HIT
            assert bytes(lease.buffer(n)) == content(key(n), size)
    totals = store.read_totals()
    assert (totals[Tier.SSD].size_bytes, totals[Tier.REMOTE].size_bytes) == (0, 4 * size)
    store.check_integrity()
    store.close()


def fill(store: TieredStore, numbers: Sequence[int], size: int) -> None:
    with store.write([ref(n) for n in numbers]) as lease:
        for i, n in enumerate(numbers):
            lease.buffer(i)[:] = content(key(n), size)
            assert lease.commit(i)


def test_probe_is_one_call_for_a_whole_prompt(bench: Bench) -> None:
    calls: list[int] = []
    get = bench.adapter.get

    def watched(wanted: Sequence[Wanted]) -> list[Fetched]:
        calls.append(len(wanted))
        return get(wanted)

    bench.adapter.get = watched  # type: ignore[method-assign]
    bench.tier.put([suite_payload(i) for i in range(3)])
    assert bench.tier.contains_run([suite_key(i) for i in range(60)]) == 3
    assert calls == [57]
