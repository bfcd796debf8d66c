"""A BlockStore that holds nothing: the reference of the contract's least answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from kvist.core.errors import LeaseError, NoSpaceError
from kvist.core.hints import Hints
from kvist.core.keys import Key
from kvist.core.outcome import BlockRef, Match, Outcome, ReadTotals, Tier


class NullLease:
    """A read lease of misses, and a write lease of nothing."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Does nothing."""

    def outcome(self, i: int) -> Outcome:
        """Always a miss."""
        return Outcome.MISS

    def ready(self) -> bool:
        """Always."""
        return True

    def wait(self, i: int, *, timeout_s: float | None = None) -> Outcome:
        """Always a miss, at once."""
        return Outcome.MISS

    def hits(self) -> int:
        """None."""
        return 0

    def present(self, i: int) -> bool:
        """Never."""
        return False

    def slot(self, i: int) -> int:
        """Raises:
        LeaseError: always.
        """
        raise LeaseError("a null lease holds no slot")

    def buffer(self, i: int) -> memoryview:
        """Raises:
        LeaseError: always.
        """
        raise LeaseError("a null lease holds no bytes")

    def commit(self, i: int, *, checksum: int | None = None) -> bool:
        """Raises:
        LeaseError: always.
        """
        raise LeaseError("a null lease has nothing to commit")


class NullStore:
    """No slots: every match is empty, every read a miss, every write refused."""

    def match(self, keys: Sequence[Key]) -> Match:
        """Nothing is present."""
        return Match(())

    def read(self, keys: Sequence[Key], *, deadline_s: float, tenant: str = "") -> NullLease:
        """A lease of misses."""
        return NullLease(len(keys))

    def write(self, blocks: Sequence[BlockRef]) -> NullLease:
        """An empty lease for no blocks.

        Raises:
            NoSpaceError: `blocks` is not empty.
        """
        if blocks:
            raise NoSpaceError(f"{len(blocks)} slots asked for, the null store has none")
        return NullLease(0)

    def prefetch(self, keys: Sequence[Key], *, deadline_s: float, tenant: str = "") -> int:
        """Nothing is to be brought."""
        return 0

    def ended(self, keys: Sequence[Key], hints: Hints) -> None:
        """Forgets it."""

    def room_blocks(self, tenant: str = "") -> int:
        """None."""
        return 0

    def read_totals(self) -> Mapping[Tier, ReadTotals]:
        """There is no tier."""
        return {}
