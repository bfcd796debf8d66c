"""An owner in a process of its own and a reader in this one, which carry blocks, for tests."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from node_process import attach, clean_env
from peer_thread import peering, until

from kvist.core.outcome import Outcome
from kvist.node.peers.carrying.transport import Carrying
from kvist.node.peers.tier import PeerTier
from kvist.testing.store_suite import content, key

BLOCK_BYTES = 300_000  # no whole number of pages
BLOCKS = 40  # more than are lent at once
START_S = 90.0
TIMEOUT_S = 2.5
REST_S = 0.2
END_S = 30.0

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed (kvist[nixl])"
)
KINDS = ["memory", pytest.param("nixl", marks=needs_nixl)]


class Owner:
    """`carried_owner.py` in a process; killed when the context ends."""

    def __init__(self, kind: str, *, blocks: int = BLOCKS) -> None:
        script = str(Path(__file__).with_name("carried_owner.py"))
        self.process = subprocess.Popen(
            [sys.executable, script, kind, str(BLOCK_BYTES), str(blocks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_env(),
        )
        self.address = self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, order: str) -> str:
        """What it answers."""
        assert self.process.stdin is not None
        print(order, file=self.process.stdin, flush=True)
        return self._line()

    def carrier(self) -> int:
        """The process that shows its arena."""
        (pid,) = map(int, self.say("carriers").split())
        return pid

    def end(self) -> None:
        """In order; its store is sound."""
        self.process.communicate(timeout=END_S)
        assert self.process.returncode == 0

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.communicate(timeout=END_S)

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()


class Reader:
    """Reads from an owner in this process."""

    def __init__(self, address: str, carrying: Carrying) -> None:
        self.carrying = carrying
        self.blocks = attach(1, block_bytes=BLOCK_BYTES)
        self.peering = replace(peering(address, carrying=carrying), timeout_s=TIMEOUT_S)
        lender = self.peering.lender(self.blocks)
        assert lender is not None
        self.tier: PeerTier = lender

    def read(self, numbers: Sequence[int]) -> list[bool]:
        """Which blocks came; those that did have the right bytes."""
        keys = [key(n) for n in numbers]
        outs = [bytearray(BLOCK_BYTES) for _ in keys]
        found = dict(self.tier.read_many(list(zip(keys, map(memoryview, outs), strict=True))))
        hits = [found[i] is Outcome.HIT for i in range(len(keys))]
        for hit, of, out in zip(hits, keys, outs, strict=True):
            assert not hit or bytes(out) == content(of, BLOCK_BYTES)
        return hits

    def learn(self, count: int) -> None:
        """Waits until it is known that the owner has the first blocks."""
        until(lambda: self.tier.contains_run([key(n) for n in range(count)]) == count, START_S)

    def carried(self) -> bool:
        """Reads a block; whether it was carried."""
        before = self.carrying.counts.blocks
        self.learn(1)
        return self.read([0]) == [True] and self.carrying.counts.blocks > before

    def carrier(self) -> int:
        """The process that reads."""
        (pid,) = self.carrying.facts()["reads"]  # type: ignore[misc]
        return int(pid)


@contextmanager
def pair(kind: str, *, blocks: int = BLOCKS) -> Iterator[tuple[Owner, Reader]]:
    """An owner of so many blocks and a reader that has read one of them by their carriers."""
    carrying = Carrying(kind, rest_s=REST_S)
    with Owner(kind, blocks=blocks) as owner:
        reader = Reader(owner.address, carrying)
        try:
            until(reader.carried, START_S)
            reader.learn(blocks)
            yield owner, reader
        finally:
            reader.tier.close()
            carrying.close()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process does nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
