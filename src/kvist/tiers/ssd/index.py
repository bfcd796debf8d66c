"""The in-memory index of the SSD tier: key → place, and which blocks were read since written."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvist.codec.frame import FrameHeader, FrameKind, frame_bytes
from kvist.core.errors import FormatError
from kvist.core.keys import Key
from kvist.native import KeyTable
from kvist.tiers.ssd.io import held
from kvist.tiers.ssd.segment import Record


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block's frame is. `segment` is the number in the file's name."""

    key: Key
    segment: int
    offset: int
    raw_bytes: int
    stored_bytes: int
    sequence: int

    @property
    def end(self) -> int:
        """Offset of the first byte after the frame."""
        return self.offset + frame_bytes(self.stored_bytes)

    def agrees(self, header: FrameHeader) -> bool:
        """Whether `header` is that of this block's frame."""
        return (
            header.kind is FrameKind.BLOCK
            and header.key == self.key
            and header.sequence == self.sequence
            and header.raw_bytes == self.raw_bytes
            and header.stored_bytes == self.stored_bytes
        )


class BlockIndex:
    """What is durable. Look-ups take no lock; changes hold one that no I/O ever holds."""

    def __init__(self) -> None:
        self._table = KeyTable()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, key: Key) -> bool:
        return key in self._table

    @property
    def memory_bytes(self) -> int:
        """What the index takes (an estimate without native code)."""
        return self._table.memory_bytes

    def get(self, key: Key) -> Place | None:
        """Where `key` is, if it is durable."""
        found = self._table.get(key)
        return None if found is None else Place(key, *found)

    def contains_run(self, keys: Sequence[Key]) -> int:
        """How many keys from the first on are durable."""
        return self._table.contains_run(keys)

    def present(self, keys: Sequence[Key]) -> bytes:
        """A byte for each key: 1 where it is durable, else 0."""
        return self._table.present(keys)

    def add_footer(self, entries: memoryview, *, segment: int, frames_end: int) -> tuple[int, int]:
        """Adds a sealed segment whose footer was proven; returns its first and last sequence.

        Segments may be added in any order: the higher sequence wins. `settle` must follow.

        Raises:
            FormatError: an entry points outside the frames, or is of an unknown kind.
        """
        with held(self._lock):
            try:
                return self._table.add_footer(entries, segment, frames_end)
            except ValueError as exc:
                raise FormatError(str(exc)) from exc

    def add(self, records: Iterable[Record]) -> None:
        """Adds frames in any order; a tombstone hides what is older. `settle` must follow."""
        with held(self._lock):
            for r in records:
                self._table.put(
                    r.key,
                    r.segment,
                    r.offset,
                    r.raw_bytes,
                    r.stored_bytes,
                    r.sequence,
                    tombstone=r.kind is FrameKind.TOMBSTONE,
                )

    def commit(self, records: Iterable[Record]) -> None:
        """Adds frames that are newer than everything here, in the order of their sequence."""
        with held(self._lock):
            for r in records:
                if r.kind is FrameKind.TOMBSTONE:
                    self._table.erase(r.key)
                else:
                    self._table.put(
                        r.key, r.segment, r.offset, r.raw_bytes, r.stored_bytes, r.sequence
                    )

    def settle(self) -> None:
        """Forgets tombstones: all that they could hide was added before."""
        with held(self._lock):
            self._table.settle()

    def touch(self, place: Place) -> None:
        """Notes that a block was read."""
        with held(self._lock):
            self._table.touch(place.key, place.sequence)

    def drop(self, places: Iterable[Place]) -> int:
        """Forgets those of `places` that are still current; returns how many."""
        with held(self._lock):
            return sum(self._table.drop(p.key, p.sequence) for p in places)

    def drop_segment(self, segment: int) -> int:
        """Forgets every block of a segment; returns how many those were."""
        with held(self._lock):
            return self._table.drop_segment(segment)

    def hot(self, segment: int) -> list[Place]:
        """The blocks of a segment that were read since they were written."""
        with held(self._lock):
            return [Place(key, *place) for key, place in self._table.hot(segment)]

    def clear(self) -> int:
        """Forgets everything; returns how many blocks that were."""
        with held(self._lock):
            count = len(self._table)
            self._table.clear()
        return count
