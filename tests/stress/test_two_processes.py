"""Eight threads in each of two processes use one store as engines do: no leak, no torn block.

The first process owns the store over a real SSD tier and decides; the second maps the arena at the
same offsets and, under leases that the first holds, fills and checks slots (`peer.py`).
KVIST_STRESS_S sets how long, KVIST_STRESS_SEED the seed.
"""

from __future__ import annotations

import faulthandler
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import peer
import pytest
from peer import BLOCK_BYTES, CONTENTS, UNIVERSE, Order, ask

from kvist.core.errors import NoSpaceError
from kvist.core.outcome import Outcome
from kvist.policy import LeafLru
from kvist.store import TieredStore
from kvist.testing.store_suite import key, ref
from kvist.tiers.dram import Arena
from kvist.tiers.ssd import FsyncMode, MissCause, SsdTier

STRESS_S = float(os.environ.get("KVIST_STRESS_S", "30"))
SEED = int(os.environ.get("KVIST_STRESS_SEED", "1"))
THREADS = 8
SLOTS = 48  # of the 160 blocks that exist; the disk holds some 80
DISK_BYTES = 1 << 20
LEAST = 500  # events that each thread sees, however slow the machine
HANG_S = 60.0  # no thread takes longer than this to end


def open_tier(directory: Path) -> SsdTier:
    return SsdTier.open(
        directory, keyspace=bytes(32), capacity_bytes=DISK_BYTES, fsync=FsyncMode.OFF
    )


@contextmanager
def other_process(arena: Arena) -> Iterator[list[socket.socket]]:
    """Starts the peer; yields a socket to each of its threads. It must end well."""
    at = arena.locator()
    pairs = [socket.socketpair() for _ in range(THREADS)]
    theirs = [pair[1].fileno() for pair in pairs]
    command = [sys.executable, peer.__file__, at.path, str(at.size_bytes), str(at.slot_bytes)]
    process = subprocess.Popen([*command, *map(str, theirs)], pass_fds=theirs)
    try:
        for _, end in pairs:
            end.close()
        for link, _ in pairs:
            link.settimeout(HANG_S)
        for link, _ in pairs:
            ask(link, Order.CHECK, [])  # it is there now
        yield [link for link, _ in pairs]
        for link, _ in pairs:
            link.close()
        assert process.wait(HANG_S) == 0
    finally:
        for link, _ in pairs:
            link.close()
        if process.poll() is None:
            process.kill()
            process.wait(HANG_S)


class Worker(threading.Thread):
    """One thread of the first process and what it counted."""

    def __init__(self, store: TieredStore, link: socket.socket, *, seed: int, end: float) -> None:
        super().__init__(name=f"worker-{seed}", daemon=True)
        self._store = store
        self._link = link
        self._chance = random.Random(seed)
        self._end = end
        self.did: Counter[str] = Counter()
        self.failure: BaseException | None = None

    def run(self) -> None:
        actions = [self.write] * 8 + [self.read] * 9 + [self.abort] * 2 + [self.others] * 2
        try:
            while time.monotonic() < self._end or self.did.total() < LEAST:
                start = self._chance.randrange(UNIVERSE - 6)
                numbers = range(start, start + self._chance.randrange(1, 7))
                try:
                    self._chance.choice(actions)(numbers)
                except NoSpaceError:
                    self.did["no space"] += 1
        except BaseException as error:
            self.failure = error
            raise

    def write(self, numbers: range) -> None:
        """Fills the absent blocks of a run, here or in the other process, and commits most."""
        with self._store.write([ref(n) for n in numbers]) as lease:
            absent = [i for i in range(len(lease)) if not lease.present(i)]
            if self._chance.random() < 0.7:
                ask(self._link, Order.FILL, [(lease.slot(i), numbers[i]) for i in absent])
                self.did["filled there"] += len(absent)
            else:
                for i in absent:
                    lease.buffer(i)[:] = CONTENTS[numbers[i]]
            for i in absent:
                if self._chance.random() < 0.9:
                    self.did["committed"] += lease.commit(i)

    def abort(self, numbers: range) -> None:
        """Reserves, lets half of each block be overwritten, and gives it all back."""
        with self._store.write([ref(n) for n in numbers]) as lease:
            absent = [i for i in range(len(lease)) if not lease.present(i)]
            ask(self._link, Order.SPOIL, [(lease.slot(i), numbers[i]) for i in absent])
            self.did["aborted"] += len(absent)

    def read(self, numbers: range) -> None:
        """Reads a run, waiting or not; what is a hit is right, in both processes, while leased."""
        deadline_s = self._chance.choice([0.0, 0.005, HANG_S])
        with self._store.read([key(n) for n in numbers], deadline_s=deadline_s) as lease:
            waits = self._chance.random() < 0.8
            outcomes = [lease.wait(i) if waits else lease.outcome(i) for i in range(len(lease))]
            hits = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.HIT]
            items = [(lease.slot(i), numbers[i]) for i in hits]
            wrong = ask(self._link, Order.CHECK, items)
            wrong += sum(lease.buffer(i) != CONTENTS[numbers[i]] for i in hits)
            assert wrong == 0, f"{wrong} of {list(numbers)} were wrong"
            self.did["checked there"] += len(hits)

    def others(self, numbers: range) -> None:
        """What callers do beside: evict, pin, look, and rarely clear."""
        keys = [key(n) for n in numbers]
        draw = self._chance.random()
        if draw < 0.4:
            self.did["evicted"] += self._store.evict(keys)
        elif draw < 0.6:
            self._store.pin(keys[:1])
            self._store.unpin(key(n) for n in range(UNIVERSE))
        elif draw < 0.75:
            self._store.match(keys)
            self._store.list(UNIVERSE)
        elif draw < 0.9:
            self._store.check_integrity()
        elif draw < 0.97:
            self._store.flush(0.01)
        else:
            self._store.clear()
            self.did["cleared"] += 1


def run_workers(store: TieredStore, links: list[socket.socket]) -> Counter[str]:
    """Lets them work; fails on the first failure, or where one does not end."""
    end = time.monotonic() + STRESS_S
    workers = [Worker(store, link, seed=SEED * 1000 + i, end=end) for i, link in enumerate(links)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()) + HANG_S)
        if worker.is_alive():
            faulthandler.dump_traceback(all_threads=True)
            pytest.fail(f"{worker.name} hangs: a deadlock")
    assert [w.failure for w in workers if w.failure is not None] == []
    return sum((w.did for w in workers), Counter())


def check_what_is_left(directory: Path) -> None:
    """Opened again, the tier holds right blocks only."""
    tier = open_tier(directory)
    assert tier.stats().recovered_segments == 0
    out = bytearray(BLOCK_BYTES)
    present = [n for n in range(UNIVERSE) if tier.contains(key(n))]
    for n in present:
        assert tier.read_into(key(n), memoryview(out)) is Outcome.HIT
        assert out == CONTENTS[n]
    assert len(present) == tier.stats().blocks
    tier.close()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the arena is a memfd")
@pytest.mark.timeout(STRESS_S + 4 * HANG_S)
def test_two_processes_of_eight_threads_leave_a_sound_store(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    arena = Arena(SLOTS * BLOCK_BYTES, slot_bytes=BLOCK_BYTES)
    store = TieredStore(arena, LeafLru(), tier, raw_bytes=BLOCK_BYTES, io_threads=2, stuck_s=HANG_S)
    with other_process(arena) as links:
        did = run_workers(store, links)
        assert store.flush(HANG_S)
        store.check_integrity()
        stats = store.stats()
        assert (stats.leases, stats.leased_blocks, stats.pinned_blocks) == (0, 0, 0)
        assert (stats.writing_blocks, stats.loading_blocks, stats.dirty_blocks) == (0, 0, 0)
        assert stats.free_blocks + stats.dram_blocks == SLOTS
        assert (stats.load_failed, stats.flush_failed, stats.breaker_opened) == (0, 0, 0)
        # The tier lost what it evicted between a look-up and its read; nothing was corrupt.
        assert set(tier.stats().misses_by_cause) <= {MissCause.ABSENT}
        assert min(stats.committed, stats.loaded, stats.evicted) > 0
        assert min(did[word] for word in ("filled there", "checked there", "aborted")) > 0
        assert tier.verify().corrupt_frames == 0
        assert tier.stats().evicted_blocks > 0
        store.close()
    check_what_is_left(tmp_path)
