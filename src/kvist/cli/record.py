"""`kvist record`: what a recording of a deployment's own traffic holds, and how to make one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvist.cli import screen
from kvist.connectors.recorder import Header
from kvist.core.errors import FormatError
from kvist.sim.advise.tables import seconds
from kvist.sim.advise.traffic import ideal
from kvist.sim.recording import read_header, read_recording
from kvist.sim.traces import Trace, lines_of

_HOW = """Record the traffic of an engine that runs with Kvist, hashes and lengths only, no text:

  KVIST_RECORD_PATH=traffic.jsonl kvist serve MODEL

or set record.path in kvist.yaml. Hashes are salted anew at each start, so a file says nothing
about prompts. Then:

  kvist record traffic.jsonl     what it holds
  kvist advise traffic.jsonl     what a cache would do for it"""


def add_parser(subparsers: Any) -> None:
    """Adds `record`."""
    parser = screen.add_command(
        subparsers,
        "record",
        summary="show a recording of your traffic, or how to make one",
        details="An engine records hashes and lengths of its requests, no text; `kvist advise` "
        "reads the file.",
        example="kvist record",
    )
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, help="a recording")
    screen.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a summary of FILE, or how to record.

    Raises:
        FormatError: it is no recording; names file, line and field.
        OSError: it cannot be read.
    """
    if args.file is None:
        if args.json:
            screen.print_json({"recording": None, "environment": "KVIST_RECORD_PATH"})
        else:
            print(_HOW)
        return 0
    lines = lines_of(args.file)
    first = next(lines, None)
    if first is None:
        raise FormatError(f"{args.file}: the file is empty")
    header = read_header(first)
    trace = read_recording(first, lines, args.file.name)
    found = _summary(header, trace)
    if args.json:
        screen.print_json(found)
        return 0
    _print(args.file, found)
    return 0


def _summary(header: Header, trace: Trace) -> dict[str, Any]:
    hits = ideal(trace.requests, trace.block_tokens).hit_tokens
    tokens = sum(request.input_tokens for request in trace.requests)
    span_s = trace.requests[-1].time_s - trace.requests[0].time_s if trace.requests else 0.0
    return {
        "version": header.kvist_recording,
        "model": header.model,
        "block_tokens": header.block_tokens,
        "requests": len(trace.requests),
        "span_s": span_s,
        "input_tokens": tokens,
        "unique_blocks": trace.unique_blocks,
        "ideal_token_hit_ratio": sum(hits) / max(1, tokens),
    }


def _print(path: Path, found: dict[str, Any]) -> None:
    grid = screen.table("", "")
    grid.show_header = False
    grid.add_row("model", found["model"] or "not named")
    grid.add_row("requests", f"{found['requests']:,} in {seconds(found['span_s'])}")
    grid.add_row("prompt tokens", f"{found['input_tokens']:,}")
    grid.add_row(
        "different blocks", f"{found['unique_blocks']:,} of {found['block_tokens']} tokens"
    )
    grid.add_row("ideal hit ratio", f"{found['ideal_token_hit_ratio']:.1%} of tokens")
    out = screen.console()
    out.print(grid)
    out.print(f"\nNext: kvist advise {path}")
