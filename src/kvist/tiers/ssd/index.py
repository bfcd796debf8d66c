"""The in-memory index of the SSD tier: key → record, and which blocks were read since written."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from kvist.codec.frame import FrameKind
from kvist.core.keys import Key
from kvist.tiers.ssd.io import held
from kvist.tiers.ssd.segment import Record


class BlockIndex:
    """What is durable. Look-ups take no lock; changes hold one that no I/O ever holds."""

    def __init__(self) -> None:
        self._records: dict[Key, Record] = {}
        self._hot: set[Key] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: Key) -> Record | None:
        """The record of `key`, if it is durable."""
        return self._records.get(key)

    def replay(self, records: Iterable[Record]) -> None:
        """Adds records in the order of their sequence: the later wins, a tombstone hides."""
        with held(self._lock):
            for record in sorted(records, key=lambda r: r.sequence):
                if record.kind is FrameKind.BLOCK:
                    self._records[record.key] = record
                else:
                    self._records.pop(record.key, None)

    def touch(self, record: Record) -> None:
        """Notes that a block was read."""
        with held(self._lock):
            if self._records.get(record.key) is record:
                self._hot.add(record.key)

    def drop(self, records: Iterable[Record]) -> int:
        """Forgets those of `records` that are still current; returns how many."""
        dropped = 0
        with held(self._lock):
            for record in records:
                if self._records.get(record.key) is record:
                    del self._records[record.key]
                    self._hot.discard(record.key)
                    dropped += 1
        return dropped

    def hot(self, records: Sequence[Record]) -> list[Record]:
        """Those of `records` that are current and were read since they were written."""
        with held(self._lock):
            return [r for r in records if r.key in self._hot and self._records.get(r.key) is r]

    def clear(self) -> int:
        """Forgets everything; returns how many blocks that were."""
        with held(self._lock):
            count = len(self._records)
            self._records.clear()
            self._hot.clear()
        return count
