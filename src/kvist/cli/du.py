"""`kvist du`: what the SSD cache holds, from the segments' footers; no payload is read."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvist.cli import screen
from kvist.codec.frame import FrameKind
from kvist.config import ssd_bytes
from kvist.core.keys import Key
from kvist.tiers.ssd.io import PosixIo, SegmentFile
from kvist.tiers.ssd.recovery import SegmentState, list_directory, read_segment
from kvist.tiers.ssd.segment import Record

_SHORT_HEX = 12


@dataclass(frozen=True, slots=True)
class KeyspaceTotal:
    """Live blocks of one keyspace, the bytes of their frames, and what decoding them gives."""

    keyspace: str
    blocks: int
    frame_bytes: int
    raw_bytes: int

    def plus(self, blocks: int, frame_bytes: int, raw_bytes: int) -> KeyspaceTotal:
        """The total with more blocks in it."""
        return KeyspaceTotal(
            self.keyspace,
            self.blocks + blocks,
            self.frame_bytes + frame_bytes,
            self.raw_bytes + raw_bytes,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """What folders hold. `used_bytes` is the segment files, dead frames included."""

    keyspaces: tuple[KeyspaceTotal, ...]
    used_bytes: int
    segments: int
    newer_segments: int
    foreign_files: int

    @property
    def blocks(self) -> int:
        """Live blocks of all keyspaces."""
        return sum(k.blocks for k in self.keyspaces)


def add_parser(subparsers: Any) -> None:
    """Adds `du`."""
    parser = screen.add_command(
        subparsers,
        "du",
        summary="show what the SSD cache holds",
        details="Reads its folders, also while an engine or a node uses them; what a node holds in "
        "DRAM and of whom, `kvist cache du` sums up. A keyspace is a model with its settings.",
        example="kvist du --json",
    )
    screen.add_folder_argument(parser)
    screen.add_config_options(parser)
    screen.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Prints blocks and bytes by keyspace.

    Raises:
        ConfigError: the configuration cannot be read, or there is none of the folders.
        TierError: the folder cannot be read.
    """
    loaded, folders, missing = screen.folders_from(args)
    # A folder that the configuration does not name has whatever cap its own process was given.
    capacity_bytes = None
    if args.dir is None:
        capacity_bytes = sum(ssd_bytes(loaded.config, folder=folder) for folder in folders)
    usage = measure(folders)
    if args.json:
        screen.print_json(
            {
                "directories": [str(folder) for folder in folders],
                "missing": [str(folder) for folder in missing],
                "keyspaces": [
                    {
                        "keyspace": k.keyspace,
                        "blocks": k.blocks,
                        "bytes": k.frame_bytes,
                        "raw_bytes": k.raw_bytes,
                    }
                    for k in usage.keyspaces
                ],
                "blocks": usage.blocks,
                "used_bytes": usage.used_bytes,
                "capacity_bytes": capacity_bytes,
                "segments": usage.segments,
                "newer_segments": usage.newer_segments,
                "foreign_files": usage.foreign_files,
            }
        )
        return 0
    _print(usage, folders, capacity_bytes)
    screen.print_missing(missing)
    return 0


def measure(folders: Sequence[Path]) -> Usage:
    """Reads the footers of every segment in `folders`, and the frames of those without one.

    Raises:
        TierError: a folder cannot be read.
    """
    parts = [_measure_one(part) for folder in folders for part in screen.cache_folders(folder)]
    totals: dict[str, KeyspaceTotal] = {}
    for total in (k for part in parts for k in part.keyspaces):
        so_far = totals.get(total.keyspace, KeyspaceTotal(total.keyspace, 0, 0, 0))
        totals[total.keyspace] = so_far.plus(total.blocks, total.frame_bytes, total.raw_bytes)
    return Usage(
        keyspaces=tuple(sorted(totals.values(), key=lambda k: (-k.frame_bytes, k.keyspace))),
        used_bytes=sum(p.used_bytes for p in parts),
        segments=sum(p.segments for p in parts),
        newer_segments=sum(p.newer_segments for p in parts),
        # The folders of shards are ours.
        foreign_files=sum(p.foreign_files for p in parts) - (len(parts) - len(folders)),
    )


def _measure_one(folder: Path) -> Usage:
    listing = list_directory(folder)
    records: list[Record] = []
    used_bytes = newer = 0
    for number, path in listing.segments.items():
        if not path.exists():
            continue  # reclaimed since it was listed
        file = SegmentFile(PosixIo(), path, os.O_RDONLY)
        try:
            used_bytes += file.size_bytes()
            contents = read_segment(file, number)
        finally:
            file.close()
        records += contents.records
        newer += contents.state is SegmentState.NEWER
    return Usage(_totals(records), used_bytes, len(listing.segments), newer, listing.foreign_files)


def _totals(records: list[Record]) -> tuple[KeyspaceTotal, ...]:
    """By keyspace. The later frame of a key wins; a tombstone hides it."""
    live: dict[Key, Record] = {}
    for record in sorted(records, key=lambda r: r.sequence):
        live.pop(record.key, None)
        if record.kind is FrameKind.BLOCK:
            live[record.key] = record
    totals: dict[str, KeyspaceTotal] = {}
    for record in live.values():
        name = record.keyspace.hex()
        so_far = totals.get(name, KeyspaceTotal(name, 0, 0, 0))
        totals[name] = so_far.plus(1, record.end - record.offset, record.raw_bytes)
    return tuple(totals.values())


def _print(usage: Usage, folders: Sequence[Path], capacity_bytes: int | None) -> None:
    columns = ("keyspace", "blocks", "bytes", "decoded")
    grid = screen.table(*columns, right=frozenset(columns[1:]))
    for keyspace in usage.keyspaces:
        grid.add_row(
            keyspace.keyspace[:_SHORT_HEX],
            f"{keyspace.blocks:,}",
            screen.format_bytes(keyspace.frame_bytes),
            screen.format_bytes(keyspace.raw_bytes),
        )
    grid.add_row("total", f"{usage.blocks:,}", screen.format_bytes(usage.used_bytes), "")
    if capacity_bytes is not None:
        grid.add_row("cap", "", screen.format_bytes(capacity_bytes), "")
    screen.console().print(grid)
    print(f"{usage.segments} segments in {', '.join(map(str, folders))}")
    if usage.newer_segments:
        print(f"{usage.newer_segments} segments were written by a newer Kvist and are left alone")
    if usage.foreign_files:
        print(f"{usage.foreign_files} other files are left alone")
