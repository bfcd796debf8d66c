"""`python -m kvist.bench.codec`: the codecs on the demo model's KV."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from kvist.bench.codec.measure import Measured, measure
from kvist.bench.codec.real_kv import collect, default_text
from kvist.bench.codec.tables import demo_table
from kvist.bench.machine import describe_machine
from kvist.bench.samples import Machine, write
from kvist.bench.screen import screen
from kvist.core.errors import ConfigError
from kvist.native import IMPLEMENTATION

_EXAMPLE = "example: python -m kvist.bench.codec --texts notes.txt --json codecs.json"


class CodecResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one run found, as it is written with `--json`."""

    machine: Machine
    native: bool
    model: str
    block_tokens: int
    block_bytes: int
    blocks: int
    rounds: int
    codecs: list[Measured]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, shows, and writes what was asked for; 2 if there is nothing to measure with."""
    parser = argparse.ArgumentParser("kvist.bench.codec", description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("--texts", type=Path, metavar="FILE", help="what the model reads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    parser.add_argument("--blocks", type=int, default=16, help="how many blocks (16)")
    parser.add_argument("--block-tokens", type=int, default=128, help="tokens in a block (128)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds (9)")
    args = parser.parse_args(argv)
    machine = describe_machine()
    try:
        text = args.texts.read_text(errors="replace") if args.texts else default_text()
        # What is measured is the text's beginning; the table is made from its second half.
        layout, blocks = collect(text, blocks=args.blocks, block_tokens=args.block_tokens)
        table = demo_table(text[len(text) // 2 :])
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    result = CodecResult(
        machine=machine,
        native=IMPLEMENTATION == "native",
        model="SmolLM2-135M-Instruct",
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        blocks=len(blocks),
        rounds=args.rounds,
        codecs=measure(layout, blocks, rounds=args.rounds, table=table),
    )
    show(result, screen())
    if args.json:
        write(result, args.json)
    return 0


def show(result: CodecResult, console: Console) -> None:
    """Prints the table."""
    grid = Table(title=f"{result.blocks} blocks of {result.block_bytes:,} bytes, {result.model}")
    grid.add_column("codec", no_wrap=True)
    grid.add_column("every bit")
    for name in ("raw ÷ stored", "encode MB/s", "decode MB/s", "decode ÷ memcpy"):
        grid.add_column(name, justify="right")
    copy = result.codecs[0].decode.median_mb_s
    for row in result.codecs:
        grid.add_row(
            row.name,
            "yes" if row.exact else "no",
            f"{row.ratio:.2f}×",
            f"{row.encode.median_mb_s:,.0f}",
            f"{row.decode.median_mb_s:,.0f}",
            f"{row.decode.median_mb_s / copy:.2f}",
        )
    console.print(grid)


if __name__ == "__main__":
    sys.exit(main())
