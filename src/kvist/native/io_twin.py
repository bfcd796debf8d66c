"""Batches of reads and writes on Python threads: the specification of `_core`'s engines."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # whether to write, descriptor, offset in bytes, buffers in order
    IoOp = tuple[bool, int, int, Sequence[memoryview]]
    Vector = Callable[[int, Sequence[memoryview], int], int]

MAX_DEPTH = 1024
_DRAIN_TIMEOUT_S = 3600.0  # an operation that hangs in the kernel owns its memory until it ends


class IoBatch:
    """Operations that were handed over together. One thread uses it."""

    def __init__(self, pool: ThreadPoolExecutor, calls: Sequence[Callable[[], int]]) -> None:
        self._ended: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._left = len(calls)
        self._futures: list[Future[None]] = [
            pool.submit(self._do, i, call) for i, call in enumerate(calls)
        ]

    def _do(self, index: int, call: Callable[[], int]) -> None:
        self._ended.put((index, call()))

    def next(self) -> tuple[int, int] | None:
        """Waits for one more operation to end.

        Returns: its index and the bytes moved, or a negative errno; `None` when all were told of.
        """
        if self._left == 0:
            return None
        self._left -= 1
        return self._ended.get()

    def close(self) -> None:
        """Begins no more and waits for what is under way. Idempotent."""
        for future in self._futures:
            future.cancel()
        wait(self._futures, timeout=_DRAIN_TIMEOUT_S)
        self._left = 0


class IoEngine:
    """At most `depth` operations at a time over all batches. Thread-safe."""

    def __init__(
        self, depth: int, *, preadv: Vector = os.preadv, pwritev: Vector = os.pwritev
    ) -> None:
        if not 1 <= depth <= MAX_DEPTH:
            raise ValueError(f"depth is not from 1 to {MAX_DEPTH}")
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(depth, "kvist-io")
        self._preadv = preadv
        self._pwritev = pwritev

    def submit(self, ops: Sequence[IoOp]) -> IoBatch:
        """Begins `ops`. Their buffers are held until the batch is closed or all have ended.

        Raises:
            ValueError: the engine was closed.
            BufferError: a buffer to be read into is read-only.
            OSError: the system refuses another ring or thread.
        """
        if self._pool is None:
            raise ValueError("the engine was closed")
        for write, _, _, buffers in ops:
            if not write and any(memoryview(b).readonly for b in buffers):
                raise BufferError("a buffer to be read into is read-only")
        return IoBatch(self._pool, [self._call(op) for op in ops])

    def _call(self, op: IoOp) -> Callable[[], int]:
        write, fd, offset, buffers = op
        move = self._pwritev if write else self._preadv

        def call() -> int:
            try:
                return move(fd, buffers, offset)
            except OSError as exc:
                return -(exc.errno or errno.EIO)

        return call

    def close(self) -> None:
        """Takes no more batches. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


def open_pool(depth: int) -> IoEngine:
    """An engine of `depth` threads.

    Raises:
        ValueError: `depth` is out of range.
        OSError: the system refuses the threads.
    """
    return IoEngine(depth)


def open_uring(depth: int) -> IoEngine:
    """An engine over io_uring, which Python cannot reach.

    Raises:
        OSError: the kernel or its policy refuses a ring (ENOSYS, EPERM); always here.
        ValueError: `depth` is out of range.
    """
    if not 1 <= depth <= MAX_DEPTH:
        raise ValueError(f"depth is not from 1 to {MAX_DEPTH}")
    raise OSError(errno.ENOSYS, "the Python twin has no io_uring")
