"""What commands share: their parser with its example, the options of configuration, the output."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvist.config import LoadedConfig, load_config, ssd_folders
from kvist.core.errors import ConfigError


def add_command(
    subparsers: Any, name: str, *, summary: str, details: str = "", example: str
) -> argparse.ArgumentParser:
    """A command's parser; its help ends in a line that can be run."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description=textwrap.fill(f"{summary[:1].upper()}{summary[1:]}. {details}".rstrip(), 78),
        epilog=f"Example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--config FILE` and `--set path=value`."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file to read (else KVIST_CONFIG, else ./kvist.yaml)",
    )
    parser.add_argument(
        "--set",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        help="set one knob, such as store.dram.capacity=8GiB; may be repeated",
    )


def config_from(args: argparse.Namespace) -> LoadedConfig:
    """The configuration that the options of `add_config_options` ask for.

    Raises:
        ConfigError: see `load_config`.
    """
    return load_config(args.config, sets=args.set)


def add_folder_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `[DIR]`."""
    parser.add_argument(
        "dir", nargs="?", type=Path, help="folder of the SSD cache (else all of store.ssd.path)"
    )


def folders_from(args: argparse.Namespace) -> tuple[LoadedConfig, list[Path], list[Path]]:
    """The configuration, the folders that the command is about, and those that are not there.

    Raises:
        ConfigError: the configuration cannot be read, or none of the folders is there.
    """
    loaded = config_from(args)
    named = [args.dir.absolute()] if args.dir is not None else list(ssd_folders(loaded.config))
    folders = [folder for folder in named if folder.is_dir()]
    if not folders:
        raise ConfigError(
            f"{named[0]} is not a folder",
            path="DIR" if args.dir is not None else "$.store.ssd.path",
            origin="" if args.dir is not None else loaded.origins["store.ssd.path"],
            remedy="give the folder of an SSD cache; an engine makes it at its first start",
        )
    return loaded, folders, [folder for folder in named if folder not in folders]


def print_missing(missing: Sequence[Path]) -> None:
    """Says which folders of the configuration were passed over."""
    for folder in missing:
        print(f"kvist: {folder} is not a folder and was passed over", file=sys.stderr)


def cache_folders(folder: Path) -> list[Path]:
    """`folder` and its shards: engines of a data-parallel group keep one each below it."""
    try:
        below = sorted(p for p in folder.iterdir() if p.is_dir() and not p.is_symlink())
        return [folder, *(p for p in below if any(p.glob("*.kvs")))]
    except PermissionError:
        return [folder]  # the command itself says what cannot be read


def print_json(value: object) -> None:
    """Prints `value` as JSON on stdout."""
    print(json.dumps(value, indent=2))


def console() -> Console:
    """Standard output; in a pipe wide enough that no cell is cut."""
    return Console(
        highlight=False, markup=False, width=None if sys.stdout.isatty() else 200, soft_wrap=False
    )


def progress_console() -> Console:
    """Standard error, where progress bars do not mix with results."""
    return Console(stderr=True, highlight=False, markup=False)


def progress_bars() -> Progress:
    """Bars of several tasks with their shares and the time left; shown in a terminal only."""
    return Progress(
        TextColumn("{task.description:<9}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=progress_console(),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def table(*columns: str, right: frozenset[str] = frozenset()) -> Table:
    """A plain table; the columns named in `right` are aligned to the right."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        grid.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return grid


def format_bytes(size_bytes: int) -> str:
    """A size for people: three digits or so, in powers of 1024."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
