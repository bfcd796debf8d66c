"""The store's contract: leases and the BlockStore Protocol (DESIGN §5).

A lease is held by a transfer and released by leaving its context. Reserve before moving: slots are
reserved whole, or the caller is told so at once. Blocks are immutable and the first writer wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from kvist.core.hints import Hints
from kvist.core.keys import Key
from kvist.core.outcome import BlockRef, Match, Outcome, ReadTotals, Tier


class Lease(Protocol):
    """Common to both kinds; slots stay put and their bytes valid until `release`."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None: ...

    def release(self) -> None:
        """Gives everything back. Idempotent; cancels what still moves."""
        ...

    def slot(self, i: int) -> int:
        """Byte offset of block i in the arena.

        Raises:
            LeaseError: the lease holds no slot for block i, or was released.
        """
        ...

    def buffer(self, i: int) -> memoryview:
        """The bytes of block i in the arena; writable in a write lease.

        Raises:
            LeaseError: as for `slot`.
        """
        ...


class ReadLease(Lease, Protocol):
    """Blocks being brought to DRAM. `HIT` means: in DRAM, checksum proven, held until release."""

    def __len__(self) -> int: ...

    def outcome(self, i: int) -> Outcome:
        """State of block i now; never blocks. After the deadline nothing is `PENDING`."""
        ...

    def ready(self) -> bool:
        """Whether no block is `PENDING`."""
        ...

    def wait(self, i: int, *, timeout_s: float | None = None) -> Outcome:
        """Blocks until block i is decided or the deadline has passed (then `MISS`).

        With `timeout_s`, at most that long; then block i may still be `PENDING`.
        """
        ...

    def hits(self) -> int:
        """Length of the run of `HIT` from the start, now."""
        ...


class WriteLease(Lease, Protocol):
    """Slots reserved for new blocks."""

    def __len__(self) -> int: ...

    def present(self, i: int) -> bool:
        """Whether block i was in the store already (or is being written by someone else)."""
        ...

    def commit(self, i: int, *, checksum: int | None = None) -> bool:
        """Makes block i visible. False if another writer was first: then this one is dropped.

        `checksum` is that of the block's bytes, if the writer took it in the pass of its copy.

        Raises:
            LeaseError: block i has no slot in this lease or was committed before.
        """
        ...


@runtime_checkable
class CommitsMany(Protocol):
    """A write lease for which one commit of many blocks is cheaper than many commits."""

    def commit_many(self, blocks: Sequence[int], checksums: Sequence[int | None]) -> Sequence[bool]:
        """What `commit` would say of each.

        Raises:
            LeaseError: one of them has no slot in this lease or was committed before.
        """
        ...


def commit_each(
    lease: WriteLease, blocks: Sequence[int], checksums: Sequence[int | None]
) -> list[bool]:
    """Commits blocks of a lease; for each whether it is visible by that (`WriteLease.commit`).

    Raises:
        LeaseError: one of them has no slot in this lease or was committed before.
    """
    if isinstance(lease, CommitsMany):
        return list(lease.commit_many(blocks, checksums))
    return [lease.commit(i, checksum=c) for i, c in zip(blocks, checksums, strict=True)]


class BlockStore(Protocol):
    """Match, read, write. Thread-safe."""

    def match(self, keys: Sequence[Key]) -> Match:
        """Longest present run from the start. Never blocks on I/O, never touches recency."""
        ...

    def read(self, keys: Sequence[Key], *, deadline_s: float, tenant: str = "") -> ReadLease:
        """Leases `keys` for reading; starts moving what is below DRAM. Returns at once.

        A block that cannot be had, for whatever reason, is a `MISS`, not an exception. What has
        to be brought to DRAM counts as `tenant`'s.

        Raises:
            NoSpaceError: DRAM, or the tenant's share of it, cannot hold them all at once now;
                nothing was reserved.
            ClosedError: the store was closed.
        """
        ...

    def write(self, blocks: Sequence[BlockRef]) -> WriteLease:
        """Reserves a slot for every block that is absent; all or nothing.

        A block counts as its first writer's until it leaves DRAM.

        Raises:
            NoSpaceError: too few slots can be freed now, or a tenant (which is named) would hold
                more than its share; nothing was reserved.
            ClosedError: the store was closed.
        """
        ...

    def prefetch(self, keys: Sequence[Key], *, deadline_s: float, tenant: str = "") -> int:
        """Begins to bring what is below to DRAM, behind all reads; never blocks, never raises.

        It is a wish: what does not begin within `deadline_s`, finds no room or exceeds the
        store's bound on wishes is dropped. Returns how many blocks are to be brought.
        """
        ...

    def ended(self, keys: Sequence[Key], hints: Hints) -> None:
        """Says how the request ended that used the blocks `keys`, in their order.

        What is not in the store is ignored. Eviction orders that learn take this as the use of
        the blocks; others learn of uses from leases alone.
        """
        ...

    def room_blocks(self, tenant: str = "") -> int:
        """Slots that `read` or `write` could reserve now for `tenant`: free plus evictable."""
        ...

    def read_totals(self) -> Mapping[Tier, ReadTotals]:
        """What was read from each tier below DRAM since the store was opened."""
        ...
