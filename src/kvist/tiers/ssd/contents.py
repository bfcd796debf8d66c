"""Which blocks a segment holds, by its footer: for listing, and to say what a reclaim evicts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Container, Iterator, Sequence

from kvist.codec.frame import FrameKind
from kvist.core.errors import TierError
from kvist.core.keys import Key
from kvist.tiers.protocol import ListedBlock
from kvist.tiers.ssd.index import BlockIndex
from kvist.tiers.ssd.io import PosixIo, SegmentFile
from kvist.tiers.ssd.recovery import read_segment
from kvist.tiers.ssd.segment import Record
from kvist.tiers.ssd.segments import Segment


def list_blocks(
    segments: Sequence[Segment], index: BlockIndex, keyspace: bytes, *, newest_first: bool
) -> Iterator[ListedBlock]:
    """The blocks of `segments` that `index` finds there; a segment that goes meanwhile is skipped.

    Raises:
        TierError: the medium failed.
    """
    for segment in reversed(segments) if newest_first else segments:
        try:
            live = _live_in(segment, index)
        except TierError:
            if segment.file.path.exists():
                raise
            continue
        for record in reversed(live) if newest_first else live:
            own, size_bytes = record.keyspace == keyspace, record.end - record.offset
            yield ListedBlock(record.key, record.parent, own, size_bytes)


def _live_in(segment: Segment, index: BlockIndex) -> list[Record]:
    """The frames of a segment that are their blocks' newest.

    Raises:
        TierError: the medium failed.
    """
    records = list(segment.records)  # of a segment that has no footer yet
    if not records:
        file = SegmentFile(PosixIo(), segment.file.path, os.O_RDONLY)
        try:
            records = list(read_segment(file, segment.number).records)
        finally:
            file.close()
    return [r for r in records if r.kind is FrameKind.BLOCK and _is_current(r, segment, index)]


def _is_current(record: Record, segment: Segment, index: BlockIndex) -> bool:
    place = index.get(record.key)
    return place is not None and (place.segment, place.offset) == (segment.number, record.offset)


class Evictions:
    """Tells a listener which blocks went with a reclaimed segment. Not thread-safe, as the log."""

    def __init__(self, index: BlockIndex) -> None:
        self.listener: Callable[[Sequence[Key]], None] | None = None
        self._index = index

    def leaving(self, segment: Segment) -> list[Key]:
        """The blocks that go when `segment` does; none where nobody asks or it is unreadable."""
        if self.listener is not None:
            with contextlib.suppress(TierError):
                return [record.key for record in _live_in(segment, self._index)]
        return []

    def tell(self, leaving: Sequence[Key], kept: Container[Key]) -> None:
        """They are gone, but for those `kept` elsewhere."""
        gone = [key for key in leaving if key not in kept]
        if gone and self.listener is not None:
            self.listener(gone)
