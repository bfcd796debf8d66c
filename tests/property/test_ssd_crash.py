"""After kill -9 every block that was reported durable is readable or evicted, never wrong.

A child process puts, removes and reads at random and says on a pipe what is done; it is killed at
a random moment, or ends itself inside a system call, half written. The first kind runs on every
engine, direct and buffered. KVIST_CRASH_ROUNDS sets the number of rounds and KVIST_CRASH_SEED the
first seed.
"""

from __future__ import annotations

import os
import random
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

ROUNDS = int(os.environ.get("KVIST_CRASH_ROUNDS", "24"))
SEED = int(os.environ.get("KVIST_CRASH_SEED", "1"))
ROUNDS_A_DIRECTORY = 3
ROUND_TIMEOUT_S = 20.0
MAX_OPERATIONS = 200


class DyingIo(PosixIo):
    """Ends the process in its n-th write, of which a random part is done."""

    def __init__(self, *, writes: int, chance: random.Random) -> None:
        self._left = writes
        self._chance = chance

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._left -= 1
        if self._left == 0:
            data = b"".join(buffers)
            # Opened again: O_DIRECT would refuse a part of a page.
            again = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
            os.pwrite(again, data[: self._chance.randrange(len(data) + 1)], offset)
            os._exit(9)
        return super().pwritev(fd, buffers, offset)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        if self._chance.random() < 0.02:
            os._exit(9)


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
        fsync=FsyncMode.OFF,  # a crash of the process, not of the machine
        io=io,
        engine=engine,
        mode=mode,
    )


def child(directory: Path, capacity_bytes: int, seed: int, first: int, pipe: int) -> None:
    """Works until it dies. Says `+i` once block i is durable, `-i` once it is removed."""
    chance = random.Random(seed)
    writes = chance.randrange(1, 120)
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
    """Forks a child, kills it after a random while, returns the complete lines that it said."""
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
    os.set_blocking(reading, False)
    chance = random.Random(seed)
    limit = time.monotonic() + ROUND_TIMEOUT_S
    kill_at = time.monotonic() + chance.uniform(0.005, 0.25)
    said = b""
    while time.monotonic() < limit:
        if time.monotonic() >= kill_at:
            os.kill(pid, signal.SIGKILL)
        try:
            part = os.read(reading, 65536)
        except BlockingIOError:
            time.sleep(0.002)
            continue
        if not part:
            break
        said += part
    os.waitpid(pid, 0)
    os.close(reading)
    return said.decode().split("\n")[:-1]


def check(directory: Path, capacity_bytes: int, tried: int, removed: set[int]) -> set[int]:
    """Opens what the child left: nothing wrong, no phantom, cap held. Returns what is present."""
    tier = open_tier(directory, capacity_bytes)
    assert tier.stats().corrupt_frames == 0
    present = {i for i in range(tried) if tier.contains(suite_key(i))}
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
@pytest.mark.timeout(60 + ROUNDS * 3)
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
        for line in run_child(directory, capacity_bytes, seed, first):
            assert line[0] in "+-", f"seed {seed}: the child failed: {line}"
            (durable if line[0] == "+" else removed).add(int(line[1:]))
        crashes += any(s.state is SegmentState.UNSEALED for s in scan_directory(directory).segments)
        tried = max(durable, default=first) + 10
        present = check(directory, capacity_bytes, tried, removed)
        missing = durable - removed - present
        if evicting:  # the newest are never the ones to go; one may be in removal
            assert len(set(sorted(durable - removed)[-4:]) & missing) <= 1, f"seed {seed}"
        else:  # a block whose removal was under way may be gone, none other
            assert len(missing) <= 1, f"seed {seed}: lost {missing}"
            removed |= missing
        first = tried
    assert crashes > 0
