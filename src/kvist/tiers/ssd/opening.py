"""What `SsdTier.open` finds in a directory: which segments are ours, and what they hold."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvist.tiers.ssd.index import BlockIndex
from kvist.tiers.ssd.io import SegmentFile, SegmentIo
from kvist.tiers.ssd.recovery import (
    SegmentContents,
    SegmentState,
    list_directory,
    read_segment,
)
from kvist.tiers.ssd.segments import Segment


@dataclass(frozen=True, slots=True)
class Found:
    """What `open` found; `segments` are ours, oldest first."""

    segments: tuple[Segment, ...]
    unsealed: tuple[int, ...]
    next_number: int
    skipped_segments: int
    foreign_files: int
    untouched_bytes: int
    corrupt_frames: int
    torn_bytes: int


def recover(directory: Path, io: SegmentIo, index: BlockIndex, undo: ExitStack) -> Found:
    """Reads what every segment holds into `index`.

    Files are closed by `undo`, those not ours at once.

    Raises:
        TierError: the medium failed.
    """
    listing = list_directory(directory)
    ours: list[tuple[SegmentContents, Segment]] = []
    states: Counter[SegmentState] = Counter()
    untouched_bytes = 0
    for number, path in listing.segments.items():
        file = SegmentFile(io, path, os.O_RDWR)
        undo.callback(file.close)
        contents = read_segment(file, number, index=index)
        states[contents.state] += 1
        size, end = file.disk_bytes(), contents.good_end
        if contents.state in (SegmentState.NEWER, SegmentState.FOREIGN):
            untouched_bytes += size
            file.close()
            continue
        segment = Segment(
            number,
            file,
            list(contents.records),
            end=end,
            synced_end=end,
            disk_bytes=size,
            last_sequence=contents.last_sequence,
        )
        ours.append((contents, segment))
    index.settle()
    ours.sort(key=lambda pair: pair[0].first_sequence)
    return Found(
        segments=tuple(s for _, s in ours),
        unsealed=tuple(s.number for c, s in ours if c.state is SegmentState.UNSEALED),
        next_number=listing.next_number,
        skipped_segments=states[SegmentState.NEWER],
        foreign_files=listing.foreign_files + states[SegmentState.FOREIGN],
        untouched_bytes=untouched_bytes,
        corrupt_frames=sum(c.corrupt_frames for c, _ in ours),
        torn_bytes=sum(c.torn_bytes for c, _ in ours),
    )
