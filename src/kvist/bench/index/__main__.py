"""`python -m kvist.bench.index [--json FILE] [--page FILE]`: the router's index beside Dynamo's."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from kvist.bench.index.report import HEADS, rows, with_section
from kvist.bench.index.run import Settings, measure
from kvist.bench.samples import write
from kvist.bench.screen import screen


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    default = Settings()
    parser = argparse.ArgumentParser(prog="python -m kvist.bench.index", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table into that page")
    for name in ("rounds", "samples", "workers", "entries", "prompt_blocks", "shared_blocks"):
        flag = "--" + name.replace("_", "-")
        value = getattr(default, name)
        parser.add_argument(flag, type=int, default=value, help=f"default: {value}")
    args = parser.parse_args(argv)
    settings = msgspec.convert(vars(args), Settings)
    outcome = measure(settings, lambda line: print(line, file=sys.stderr))
    if args.json:
        write(outcome, args.json)
    if args.page:
        args.page.write_text(with_section(args.page.read_text(), outcome))
    table = Table(*HEADS, box=None, pad_edge=False)
    for row in rows(outcome):
        table.add_row(*row)
    screen().print(table)
    for name, why in outcome.missing.items():
        print(f"{name}: not measured: {why}")
    return 0 if any(outcome.figures.values()) else 2


if __name__ == "__main__":
    sys.exit(main())
