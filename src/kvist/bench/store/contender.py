"""What every store under test, and every limit, is asked to do; and the blocks it is given."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import TimeoutError
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from kvist.core.keys import Key
from kvist.native import chain_keys
from kvist.tiers.mapping import collapse, map_shared, populate

Bytes = npt.NDArray[np.uint8]

BLOCK_TOKENS = 16
_JOIN_S = 120.0
_SAMPLED = 8  # blocks that are compared after a read


class ContenderError(RuntimeError):
    """A contender could not do what it was asked, or gave back other bytes."""


class Contender(Protocol):
    """A store of blocks. All times are of all blocks together."""

    def write(self, round_number: int) -> float:
        """Stores every block under keys that it has not; seconds."""
        ...

    def read(self, round_number: int) -> float | None:
        """Reads every block of that round's `write` back; seconds, or `None` if it has no such.

        Raises:
            ContenderError: what came back is not what was stored.
        """
        ...

    def close(self) -> None:
        """Ends what it started, deletes what it wrote."""
        ...


class Blocks:
    """The blocks of a run, in memory that child processes can map, and room to read them into."""

    def __init__(self, *, count: int, block_bytes: int, seed: int) -> None:
        self.count, self.block_bytes = count, block_bytes
        self._fd = os.memfd_create("kvist-bench-blocks")
        os.ftruncate(self._fd, self.total_bytes)
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._fd}")
        source, at = map_shared(self._fd, self.total_bytes)
        in_huge_pages(at, self.total_bytes)
        self._room = os.memfd_create("kvist-bench-room")
        os.ftruncate(self._room, self.total_bytes)
        target, at = map_shared(self._room, self.total_bytes)
        in_huge_pages(at, self.total_bytes)
        self.source = np.frombuffer(source, np.uint8).reshape(count, -1)
        self.target = np.frombuffer(target, np.uint8).reshape(count, -1)
        random = np.random.default_rng(seed)
        for row in self.source:  # block by block, so that no second copy of all is needed
            row[:] = random.integers(0, 256, block_bytes, np.uint8)
        self.target[:] = 1

    @property
    def total_bytes(self) -> int:
        return self.count * self.block_bytes

    def view(self, i: int) -> memoryview:
        """Block i."""
        return memoryview(self.source[i])

    def room(self, i: int) -> memoryview:
        """Where block i is read to."""
        return memoryview(self.target[i])

    def forget(self) -> None:
        """Makes what is compared differ, before a read."""
        for i in self._sampled():
            self.target[i] = 0

    def prove(self, who: str) -> None:
        """Compares what was read.

        Raises:
            ContenderError: it is not what was stored.
        """
        for i in self._sampled():
            if not np.array_equal(self.target[i], self.source[i]):
                raise ContenderError(f"{who} gave back other bytes for block {i}")

    def _sampled(self) -> Sequence[int]:
        return range(0, self.count, max(1, self.count // _SAMPLED))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        os.close(self._fd)
        os.close(self._room)


def in_huge_pages(address: int, size_bytes: int) -> None:
    """Makes memory present, in huge pages where the kernel grants them: for every contender."""
    populate(address, size_bytes)
    collapse(address, size_bytes)


def round_keys(round_number: int, count: int) -> list[Key]:
    """The keys of a prompt that no other round has."""
    seed = round_number.to_bytes(32, "little")
    return chain_keys(seed, np.zeros(count * BLOCK_TOKENS, np.uint32), BLOCK_TOKENS)


@cache
def _hands(threads: int) -> ThreadPool:
    """Threads that stay, as an engine's do: new ones start on one core, for milliseconds."""
    pool = ThreadPool(threads)
    atexit.register(pool.terminate)
    return pool


def share_out(threads: int, count: int, work: Callable[[int], None]) -> None:
    """Calls `work` with 0 to `count - 1` on that many threads.

    Raises:
        ContenderError: a thread did not end in time, or `work` raised an `OSError` or this error.
    """
    failures: list[Exception] = []

    def run(first: int) -> None:
        try:
            for i in range(first, count, threads):
                work(i)
        except (OSError, ContenderError) as error:
            failures.append(error)

    try:
        _hands(threads).map_async(run, range(threads), chunksize=1).get(_JOIN_S)
    except TimeoutError:
        raise ContenderError(f"a thread was still at it after {_JOIN_S:.0f} s") from None
    for failure in failures:
        raise ContenderError(str(failure)) from failure
