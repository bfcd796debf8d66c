"""What a tier below DRAM must do; ten lines that a new medium implements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvist.codec.frame import RAW_CODEC
from kvist.core.errors import TierError
from kvist.core.keys import Key
from kvist.core.outcome import Outcome, ReadTotals, Tier


@dataclass(frozen=True, slots=True)
class Payload:
    """One block on its way down: its identity and its encoded bytes (valid during the call).

    `checksum` is that of `data`, if its writer took it. `codec` names what `data` was encoded with,
    `raw_bytes` is the size of the decoded block; by default the bytes are the block itself.
    `tenant` is whose key seals it where the tier seals.
    """

    key: Key
    parent: Key | None
    data: memoryview
    codec: str = RAW_CODEC
    raw_bytes: int | None = None
    checksum: int | None = None
    tenant: str = ""

    @property
    def decoded_bytes(self) -> int:
        """Size of the block that `read_into` gives back."""
        return self.data.nbytes if self.raw_bytes is None else self.raw_bytes


class LowerTier(Protocol):
    """A bounded pool of blocks on one medium. Thread-safe. Bytes are checked on every read."""

    def contains(self, key: Key) -> bool:
        """Whether `key` is durable here. A dictionary look-up: no I/O, no lock that I/O holds."""
        ...

    def put(self, payloads: Sequence[Payload]) -> None:
        """Stores blocks; they are durable when it returns. Present keys are skipped.

        Makes room by evicting its own oldest blocks.

        Raises:
            TierFullError: no space even after eviction (ENOSPC, byte cap).
            TierError: the medium failed. In either case what was not stored is absent.
        """
        ...

    def read_into(self, key: Key, out: memoryview) -> Outcome:
        """Fills `out` (the block's exact raw size) and proves the checksum: `HIT` or `MISS`.

        Corruption, truncation or absence is a counted `MISS`; the entry is then dropped.

        Raises:
            TierError: the medium failed (EIO, a deleted directory …).
        """
        ...

    def remove(self, keys: Iterable[Key]) -> None:
        """Forgets blocks for good: after a restart they are still absent."""
        ...

    def close(self) -> None:
        """Makes a clean end (index footer). Idempotent."""
        ...


@runtime_checkable
class BatchReader(Protocol):
    """What a lower tier may do besides: read many blocks at once."""

    def read_many(
        self, items: Sequence[tuple[Key, memoryview]]
    ) -> Iterator[tuple[int, Outcome | TierError]]:
        """Reads as `read_into` does; yields each item's index and outcome as it is decided.

        Every index comes once, in any order; a medium's failure is yielded, not raised. Buffers
        belong to the tier until the iterator has ended or was closed.

        Raises:
            ClosedError: the tier was closed.
        """
        ...


@runtime_checkable
class RunFinder(Protocol):
    """What a lower tier may do besides: look up many keys in one call."""

    def contains_run(self, keys: Sequence[Key]) -> int:
        """How many keys from the first on are present: `contains`, until one is not."""
        ...


@runtime_checkable
class TellsEvictions(Protocol):
    """What a lower tier may do besides: say which blocks it has dropped to make room."""

    def tell_evictions(self, tell: Callable[[Sequence[Key]], None]) -> None:
        """From now on calls `tell` with keys that are gone, within `put`; must not call back."""
        ...


@dataclass(frozen=True, slots=True)
class ListedBlock:
    """A durable block and its parent, as its frame names them.

    `own`: it is of the keyspace that the tier was opened for; others share its medium.
    `size_bytes`: what its frame takes there, if that is known.
    """

    key: Key
    parent: Key | None
    own: bool = True
    size_bytes: int | None = None


@runtime_checkable
class Lists(Protocol):
    """What a lower tier may do besides: name the blocks that it holds."""

    def list_blocks(self, *, newest_first: bool = False) -> Iterator[ListedBlock]:
        """The durable blocks in the order of their writes; what comes or goes may be missing.

        Raises:
            TierError: the medium failed.
        """
        ...


@runtime_checkable
class Sampled(Protocol):
    """What a lower tier may do besides: give numbers of its own for the metrics."""

    def samples(self) -> Mapping[str, float]:
        """Totals since open, and gauges, by the metric's name and a label's value after a dot."""
        ...


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes of a medium that are taken, and that may be."""

    used_bytes: int
    capacity_bytes: int


@runtime_checkable
class TellsSpace(Protocol):
    """What a lower tier may do besides: say how full this host's own medium is."""

    def space(self) -> Space | None:
        """Now; `None` where this host has no medium of its own. No I/O."""
        ...


@runtime_checkable
class TellsOwn(Protocol):
    """What a lower tier may do besides: tell this host's own blocks from those that others have.

    One that does not is of this host alone: what it contains, it keeps and holds.
    """

    def keeps(self, key: Key) -> bool:
        """Whether a `put` of `key` would be in vain; what a peer has is not kept. No I/O."""
        ...

    def holds(self, key: Key) -> bool:
        """Whether this host's own medium has `key`. No I/O, and nobody is asked for it later."""
        ...

    def lacks(self, key: Key) -> bool:
        """Whether this host has a medium that should get `key`, now that it was read. No I/O."""
        ...


@runtime_checkable
class Stacked(Protocol):
    """What a lower tier of several media may do besides: tell them apart."""

    def tiers_of(self, keys: Sequence[Key]) -> tuple[Tier, ...]:
        """The fastest medium that has each of `keys`, which are present. No I/O."""
        ...

    def read_totals(self) -> Mapping[Tier, ReadTotals]:
        """What was read from each medium so far."""
        ...
