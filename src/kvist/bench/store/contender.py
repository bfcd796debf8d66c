"""What every store under test, and every limit, is asked to do; and the blocks it is given."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from kvist.core.keys import Key
from kvist.native import chain_keys

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

    def __init__(self, folder: Path, *, count: int, block_bytes: int, seed: int) -> None:
        """`folder` should be in memory."""
        self.count, self.block_bytes = count, block_bytes
        self.path = folder / "blocks"
        with self.path.open("w+b") as file:
            os.ftruncate(file.fileno(), self.total_bytes)
            self._source = mmap.mmap(file.fileno(), self.total_bytes)
        self._target = mmap.mmap(-1, self.total_bytes)
        self._target.madvise(mmap.MADV_HUGEPAGE)
        self.source = _rows(self._source, count)
        self.target = _rows(self._target, count)
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
        self.path.unlink(missing_ok=True)


def _rows(memory: mmap.mmap, count: int) -> Bytes:
    return np.frombuffer(memory, np.uint8).reshape(count, -1)


def round_keys(round_number: int, count: int) -> list[Key]:
    """The keys of a prompt that no other round has."""
    seed = round_number.to_bytes(32, "little")
    return chain_keys(seed, np.zeros(count * BLOCK_TOKENS, np.uint32), BLOCK_TOKENS)


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

    started = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(_JOIN_S)
        if thread.is_alive():
            raise ContenderError(f"a thread was still at it after {_JOIN_S:.0f} s")
    for failure in failures:
        raise ContenderError(str(failure)) from failure
