"""The segment log's index in Python: the specification of `_core.KeyTable`."""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvist.core.keys import KEY_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

    # segment, offset, raw_bytes, stored_bytes, sequence
    Place = tuple[int, int, int, int, int]

_FOOTER_ENTRY = struct.Struct("<32s32s32sQQQQHHI")  # see `tiers.ssd.segment`
_PAGE_BYTES = 4096
_BLOCK, _TOMBSTONE = 1, 2


class KeyTable:
    """Key → where its newest frame is. Each look-up is atomic; changes need the caller's lock.

    Frames may be put in any order: the highest sequence of a key decides. A tombstone hides what
    is older; `settle` forgets tombstones once everything that they may hide has been put.
    """

    def __init__(self) -> None:
        self._places: dict[bytes, Place] = {}
        self._tombstones: dict[bytes, Place] = {}
        self._members: dict[int, dict[bytes, None]] = {}
        self._hot: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def get(self, key: bytes) -> Place | None:
        """Segment, offset, raw bytes, stored bytes and sequence of a present block."""
        return self._places.get(key)

    def contains_run(self, keys: Sequence[bytes]) -> int:
        """How many keys from the first on are present."""
        for i, key in enumerate(keys):
            if key not in self._places:
                return i
        return len(keys)

    def present(self, keys: Sequence[bytes]) -> bytes:
        """A byte for each key: 1 where it is present, else 0."""
        return bytes(key in self._places for key in keys)

    def put(
        self,
        key: bytes,
        segment: int,
        offset: int,
        raw_bytes: int,
        stored_bytes: int,
        sequence: int,
        *,
        tombstone: bool = False,
    ) -> None:
        """Takes a frame over unless the key has one of a higher sequence.

        Raises:
            ValueError: the key is not 32 bytes.
        """
        if len(key) != KEY_BYTES:
            raise ValueError("a key is 32 bytes")
        old = self._places.get(key) or self._tombstones.get(key)
        if old is not None:
            if old[4] > sequence:
                return
            self.erase(key)
        target = self._tombstones if tombstone else self._places
        target[key] = (segment, offset, raw_bytes, stored_bytes, sequence)
        self._members.setdefault(segment, {})[key] = None

    def erase(self, key: bytes) -> None:
        """Forgets a key, tombstone or not."""
        old = self._places.pop(key, None) or self._tombstones.pop(key, None)
        if old is not None:
            del self._members[old[0]][key]
            self._hot.discard(key)

    def add_footer(self, entries: Buffer, segment: int, frames_end: int) -> tuple[int, int]:
        """Puts the entries of a segment's footer; returns the lowest and highest sequence.

        Raises:
            ValueError: an entry is of an unknown kind or outside the frames; nothing was put.
        """
        view = memoryview(entries).cast("B")
        if len(view) % _FOOTER_ENTRY.size:
            raise ValueError("a footer of odd length")
        found = list(_FOOTER_ENTRY.iter_unpack(view))
        for _, _, _, offset, _, stored, _, kind, _, _ in found:
            if kind not in (_BLOCK, _TOMBSTONE):
                raise ValueError("unknown frame kind in a segment footer")
            end = offset + _PAGE_BYTES + -(-stored // _PAGE_BYTES) * _PAGE_BYTES
            if offset < _PAGE_BYTES or offset % _PAGE_BYTES or end > frames_end:
                raise ValueError("a footer entry outside the frames")
        for key, _, _, offset, raw, stored, sequence, kind, _, _ in found:
            self.put(key, segment, offset, raw, stored, sequence, tombstone=kind == _TOMBSTONE)
        sequences = [entry[6] for entry in found] or [0]
        return min(sequences), max(sequences)

    def settle(self) -> None:
        """Forgets the tombstones."""
        for key in list(self._tombstones):
            self.erase(key)

    def touch(self, key: bytes, sequence: int) -> bool:
        """Marks a block as read, if its frame is still this one."""
        place = self._places.get(key)
        if place is None or place[4] != sequence:
            return False
        self._hot.add(key)
        return True

    def drop(self, key: bytes, sequence: int) -> bool:
        """Forgets a block, if its frame is still this one."""
        place = self._places.get(key)
        if place is None or place[4] != sequence:
            return False
        self.erase(key)
        return True

    def hot(self, segment: int) -> list[tuple[bytes, Place]]:
        """The blocks of a segment that were read since they were put."""
        members = self._members.get(segment, {})
        return [(key, self._places[key]) for key in members if key in self._hot]

    def drop_segment(self, segment: int) -> int:
        """Forgets the blocks of a segment; returns how many those were."""
        keys = list(self._members.get(segment, ()))
        dropped = sum(key in self._places for key in keys)
        for key in keys:
            self.erase(key)
        self._members.pop(segment, None)
        return dropped

    def clear(self) -> None:
        """Forgets everything."""
        self._places.clear()
        self._tombstones.clear()
        self._members.clear()
        self._hot.clear()

    @property
    def memory_bytes(self) -> int:
        """A rough estimate of what it takes."""
        each = (
            sys.getsizeof(bytes(KEY_BYTES)) + sys.getsizeof((0,) * 5) + 5 * sys.getsizeof(1 << 40)
        )
        return sys.getsizeof(self._places) + len(self._places) * each
