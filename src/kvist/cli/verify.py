"""`kvist verify`: reads the whole SSD cache and checks every checksum; changes nothing."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from kvist.cli import screen
from kvist.tiers.ssd.recovery import SegmentReport, VerifyReport, scan_directory
from kvist.tiers.ssd.segment import segment_name


def add_parser(subparsers: Any) -> None:
    """Adds `verify`."""
    parser = screen.add_command(
        subparsers,
        "verify",
        summary="read the SSD cache and check every checksum",
        details="Changes nothing and works while an engine uses the cache. Exits with 1 if a "
        "frame is corrupt; an engine treats such a block as a miss.",
        example="kvist verify --json",
    )
    screen.add_folder_argument(parser)
    screen.add_config_options(parser)
    screen.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Verifies and reports by segment.

    Raises:
        ConfigError: the configuration cannot be read, or there is none of the folders.
        TierError: the folder cannot be read.
    """
    _, folders, missing = screen.folders_from(args)
    with_bar = sys.stderr.isatty() and not args.json
    segments = [
        (_shown(part / segment_name(s.number), folder, alone=len(folders) == 1), s)
        for folder in folders
        for part in screen.cache_folders(folder)
        for s in _scan(part, with_bar=with_bar).segments
    ]
    bad = [(name, s) for name, s in segments if s.corrupt_frames]
    frames_ok = sum(s.frames_ok for _, s in segments)
    corrupt_frames = sum(s.corrupt_frames for _, s in bad)
    torn_bytes = sum(s.torn_bytes for _, s in segments)
    if args.json:
        screen.print_json(
            {
                "directories": [str(folder) for folder in folders],
                "missing": [str(folder) for folder in missing],
                "ok": not bad,
                "frames_ok": frames_ok,
                "corrupt_frames": corrupt_frames,
                "torn_bytes": torn_bytes,
                "segments": [{"segment": name, **_as_json(s)} for name, s in segments],
            }
        )
        return int(bool(bad))
    if bad:
        numbers = frozenset({"good frames", "corrupt frames"})
        grid = screen.table("segment", "good frames", "corrupt frames", right=numbers)
        for name, segment in bad:
            grid.add_row(name, f"{segment.frames_ok:,}", f"{segment.corrupt_frames:,}")
        screen.console().print(grid)
    print(
        f"{len(segments)} segments, {frames_ok:,} good frames, {corrupt_frames:,} corrupt, "
        f"{screen.format_bytes(torn_bytes)} of torn tails"
    )
    screen.print_missing(missing)
    print("corrupt" if bad else "ok")
    return int(bool(bad))


def _shown(path: Path, folder: Path, *, alone: bool) -> str:
    """A segment's name below `folder`, or its whole path where there are more folders."""
    return str(path.relative_to(folder) if alone else path)


def _scan(folder: Path, *, with_bar: bool) -> VerifyReport:
    if not with_bar:
        return scan_directory(folder)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen.progress_console(), transient=True) as bar:
        task = bar.add_task("verify", total=None)
        return scan_directory(
            folder, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )


def _as_json(segment: SegmentReport) -> dict[str, object]:
    return {
        "state": segment.state.value,
        "bytes": segment.size_bytes,
        "frames_ok": segment.frames_ok,
        "corrupt_frames": segment.corrupt_frames,
        "torn_bytes": segment.torn_bytes,
    }
