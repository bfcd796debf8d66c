"""Chooses how batches of I/O are done: io_uring, a native pool, or Python threads over a seam."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from kvist.native import io_twin, open_pool, open_uring
from kvist.tiers.ssd.io import SegmentIo, tier_error

if TYPE_CHECKING:
    from kvist.native.io_twin import IoOp

_log = logging.getLogger(__name__)

DEFAULT_DEPTH = 4
MAX_POOL_THREADS = 16


class EngineKind(Enum):
    """How batches are done. AUTO is the best that works here."""

    AUTO = "auto"
    URING = "uring"  # io_uring
    POOL = "pool"  # threads that call preadv and pwritev: C++, or Python where that is missing
    TWIN = "twin"  # Python threads


class IoBatch(Protocol):
    """Operations that were begun together; one thread uses it."""

    def next(self) -> tuple[int, int] | None:
        """Index of one more that ended and its bytes, or -errno; `None` when all were told of."""
        ...

    def close(self) -> None:
        """Waits for what is under way. Idempotent."""
        ...


class IoEngine(Protocol):
    """Does batches. Thread-safe."""

    def submit(self, ops: Sequence[IoOp]) -> IoBatch:
        """Begins operations; see `native.io_twin`."""
        ...

    def close(self) -> None:
        """Takes no more. Idempotent."""
        ...


def open_engine(kind: EngineKind, *, depth: int = DEFAULT_DEPTH) -> tuple[EngineKind, IoEngine]:
    """An engine with at most `depth` operations under way a batch, and what it became.

    Where the kernel refuses a ring (no such call, a container's policy), URING is the pool too.

    Raises:
        ValueError: the depth is not from 1 to 1024.
        OSError: the system refuses the threads.
    """
    if kind is EngineKind.TWIN:
        return kind, io_twin.open_pool(min(depth, MAX_POOL_THREADS))
    if kind is not EngineKind.POOL:
        try:
            return EngineKind.URING, open_uring(depth)
        except OSError as error:
            _log.debug("io_uring is not to be had (%s): threads instead", error)
    return EngineKind.POOL, open_pool(min(depth, MAX_POOL_THREADS))


def open_engines(
    kind: EngineKind, *, depth: int, io: SegmentIo | None = None
) -> tuple[EngineKind, IoEngine, IoEngine]:
    """What the reads' engine became, that engine, and the one for writes.

    The log writes one large run at a time, which the block layer splits: one thread that is in the
    call is faster there than a ring, which hands a write that makes a file longer to a worker.
    With an `io` every operation goes through it, one read and one write at a time: for tests that
    fail it.

    Raises:
        TierError: the system refuses the threads.
    """
    if io is not None:
        seams = [io_twin.IoEngine(1, preadv=io.preadv, pwritev=io.pwritev) for _ in range(2)]
        return EngineKind.TWIN, seams[0], seams[1]
    try:
        became, reads = open_engine(kind, depth=depth)
        writes = EngineKind.TWIN if kind is EngineKind.TWIN else EngineKind.POOL
        return became, reads, open_engine(writes, depth=1)[1]
    except OSError as exc:
        raise tier_error(exc, "start the threads for I/O") from exc
