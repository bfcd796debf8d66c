"""What a tier below DRAM must do; ten lines that a new medium implements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvist.core.keys import Key
from kvist.core.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Payload:
    """One block on its way down: its identity and its encoded bytes (valid during the call)."""

    key: Key
    parent: Key | None
    data: memoryview


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
