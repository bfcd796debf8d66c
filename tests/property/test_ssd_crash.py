"""After kill -9 every block that was reported durable is readable or evicted, never wrong.

A child process puts, removes and reads at random and says on a pipe what is done. It is killed
from outside, some microseconds after its n-th word or after its start, on every engine, direct and
buffered; or it ends itself inside a write, half done, or before or after a sync or a deletion. The
seed decides all but where within its next few system calls the first kind is met. What a failed
test printed last are the variables that begin with its directory again. KVIST_CRASH_ROUNDS sets
the number of rounds for each capacity, KVIST_CRASH_SEED the first seed.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvist.testing.tier_suite import read_block, suite_block, suite_key, suite_payload
from kvist.tiers.ssd import (
    EngineKind,
    FsyncMode,
    IoMode,
    PosixIo,
    SegmentState,
    SsdTier,
    scan_directory,
)

ROUNDS = int(os.environ.get("KVIST_CRASH_ROUNDS", "200"))
SEED = int(os.environ.get("KVIST_CRASH_SEED", "1"))
ROUNDS_A_DIRECTORY = 3
ROUND_TIMEOUT_S = 120.0
MAX_OPERATIONS = 60
MAX_WORDS = 100  # roughly what a child says that is not killed
MAX_DELAY_S = 0.004  # an operation or two


class DyingIo(PosixIo):
    """Ends the process in its n-th write, of which a random part is done, or around another call.

    Nothing is really synced: a process that dies loses no page cache.
    """

    def __init__(self, *, writes: int, chance: random.Random) -> None:
        self._left = writes
        self._chance = chance

    def _maybe_die(self, share: float) -> None:
        if self._chance.random() < share:
            os._exit(9)

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        if flags & os.O_CREAT:
            self._maybe_die(0.02)
        return fd

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._left -= 1
        if self._left == 0:
            data = b"".join(buffers)
            # Opened again: O_DIRECT would refuse a part of a page.
            again = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
            os.pwrite(again, data[: self._chance.randrange(len(data) + 1)], offset)
            os._exit(9)
        return super().pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self._maybe_die(0.01)  # written, but not yet visible

    def unlink(self, path: Path) -> None:
        self._maybe_die(0.02)
        super().unlink(path)
        self._maybe_die(0.02)


def size_of(i: int) -> int:
    return (100, 4096, 9000, 20_000)[i % 4]


def open_tier(
    directory: Path,
    capacity_bytes: int,
    *,
    io: PosixIo | None = None,
    engine: EngineKind = EngineKind.AUTO,
    mode: IoMode = IoMode.AUTO,
) -> SsdTier:
    return SsdTier.open(
        directory,
        keyspace=bytes(32),
        capacity_bytes=capacity_bytes,
        segment_bytes=300_000,
        # A crash of the process, not of the machine: only `DyingIo` is asked to sync.
        fsync=FsyncMode.OFF if io is None else FsyncMode.BATCH,
        io=io,
        engine=engine,
        mode=mode,
    )


def child(directory: Path, capacity_bytes: int, seed: int, first: int, pipe: int) -> None:
    """Works until it dies. Says `+i` once block i is durable, `-i` once it is removed."""
    chance = random.Random(seed)
    writes = chance.randrange(1, 100)
    tier = open_tier(
        directory,
        capacity_bytes,
        io=DyingIo(writes=writes, chance=chance) if chance.random() < 0.5 else None,
        engine=chance.choice(list(EngineKind)),
        mode=chance.choice(list(IoMode)),
    )
    i = first
    for _ in range(MAX_OPERATIONS):
        batch = range(i, i + chance.randrange(1, 4))
        i = batch.stop
        tier.put([suite_payload(j, size_of(j)) for j in batch])
        os.write(pipe, b"".join(b"+%d\n" % j for j in batch))
        if chance.random() < 0.2:
            victim = chance.randrange(first, i)
            tier.remove([suite_key(victim)])
            os.write(pipe, b"-%d\n" % victim)
        recent = chance.randrange(max(first, i - 20), i)
        read_block(tier, recent, size_of(recent))
    if chance.random() < 0.5:
        tier.close()


def run_child(directory: Path, capacity_bytes: int, seed: int, first: int) -> list[str]:
    """Forks a child, kills it at the seed's moment, returns the complete words that it said."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            child(directory, capacity_bytes, seed, first, writing)
        except BaseException as exc:
            os.write(writing, f"!{exc!r}\n".encode())
            raise
        finally:
            os._exit(0)
    os.close(writing)
    chance = random.Random(f"kill {seed}")
    words, delay_s = chance.randrange(MAX_WORDS), MAX_DELAY_S * chance.random()
    if chance.random() < 0.15:  # while it opens what it found
        words, delay_s = 0, 5 * delay_s
    limit = time.monotonic() + ROUND_TIMEOUT_S
    said, killed = b"", False
    while (left := limit - time.monotonic()) > 0:
        if not killed and said.count(b"\n") >= words:
            time.sleep(delay_s)
            os.kill(pid, signal.SIGKILL)
            killed = True
        if select.select([reading], [], [], left)[0]:
            part = os.read(reading, 65536)
            if not part:
                break
            said += part
    if left <= 0:
        os.kill(pid, signal.SIGABRT)  # says where it hangs, if there is a fault handler
    else:
        os.kill(pid, signal.SIGKILL)  # not yet waited for: it is ours, dead or alive
    os.waitpid(pid, 0)
    os.close(reading)
    assert left > 0, f"seed {seed}: the child neither worked nor died in {ROUND_TIMEOUT_S} s"
    return said.decode().split("\n")[:-1]


def check(directory: Path, capacity_bytes: int, tried: int, removed: set[int]) -> set[int]:
    """Opens what the child left: nothing wrong, no phantom, cap held. Returns what is present."""
    tier = open_tier(directory, capacity_bytes)
    assert tier.stats().corrupt_frames == 0
    present = {i for i in range(tried) if tier.contains(suite_key(i))}
    assert tier.stats().blocks == len(present)
    assert present & removed == set()
    for i in present:
        assert read_block(tier, i, size_of(i)) == suite_block(i, size_of(i))
    tier.close()
    used = sum(max(p.stat().st_size, p.stat().st_blocks * 512) for p in directory.iterdir())
    assert used <= capacity_bytes
    report = scan_directory(directory)
    assert report.corrupt_frames == 0
    assert {s.state for s in report.segments} <= {SegmentState.SEALED}
    return present


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork and kill -9")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the child only does our I/O
@pytest.mark.timeout(3 * ROUND_TIMEOUT_S + ROUNDS * 3)
@pytest.mark.parametrize("capacity_bytes", [400_000, 1 << 30], ids=["evicting", "ample"])
def test_killed_process_leaves_every_durable_block_right_or_evicted(
    tmp_path: Path, capacity_bytes: int
) -> None:
    evicting = capacity_bytes < 1 << 30
    durable: set[int] = set()
    removed: set[int] = set()
    first, crashes = 0, 0
    for round_ in range(ROUNDS):
        seed = SEED + round_
        directory = tmp_path / str(round_ // ROUNDS_A_DIRECTORY)
        if round_ % ROUNDS_A_DIRECTORY == 0:
            durable, removed, first = set(), set(), 0
            print(f"KVIST_CRASH_SEED={seed} KVIST_CRASH_ROUNDS={ROUNDS_A_DIRECTORY}")
            directory.mkdir()  # here: the child may die before it gets to it
        for word in run_child(directory, capacity_bytes, seed, first):
            assert word[0] in "+-", f"seed {seed}: the child failed: {word}"
            (durable if word[0] == "+" else removed).add(int(word[1:]))
        crashes += any(s.state is SegmentState.UNSEALED for s in scan_directory(directory).segments)
        tried = max(first, *durable, 0) + 10
        present = check(directory, capacity_bytes, tried, removed)
        missing = durable - removed - present
        if evicting:  # the newest are never the ones to go; one may be in removal
            assert len(set(sorted(durable - removed)[-4:]) & missing) <= 1, f"seed {seed}"
        else:  # a block whose removal was under way may be gone, none other
            assert len(missing) <= 1, f"seed {seed}: lost {missing}"
            removed |= missing
        first = tried
        if round_ % ROUNDS_A_DIRECTORY == ROUNDS_A_DIRECTORY - 1:
            shutil.rmtree(directory)
    assert crashes >= ROUNDS // 4
