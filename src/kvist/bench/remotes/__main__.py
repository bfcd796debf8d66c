"""`python -m kvist.bench.remotes [--json FILE] [--page DOC]`: remotes beside plain clients."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvist.bench.machine import describe_machine, load
from kvist.bench.remotes.run import KVIST, MEDIA, PLAIN, Outcomes, Settings, measure
from kvist.bench.samples import Machine, write
from kvist.bench.store.contender import ContenderError
from kvist.sim.markdown import table, written_behind

_GB = 1e9
_HEADS = (
    *("medium", "plain client", "put: plain", "put: Kvist", "ratio"),
    *("get: plain", "get: Kvist", "ratio"),
)
MARK = "<!-- Below: written by `python -m kvist.bench.remotes --page` from a kept run. -->"
_CLIENTS = {
    "files": "`write`, `fdatasync`, `readv`",
    "redis": "redis-py",
    "s3": "obstore, to moto's server",
    "mooncake": "its own client, over TCP",
}


class Kept(msgspec.Struct, frozen=True):
    """A run as it is written to a file."""

    machine: Machine
    outcomes: Outcomes
    put_ratio: dict[str, float]
    get_ratio: dict[str, float]
    load_after: float
    part: str = "remotes"
    schema: int = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    default = Settings()
    parser = argparse.ArgumentParser(prog="python -m kvist.bench.remotes", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value there")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="kept", help="measure nothing")
    parser.add_argument("--page", type=Path, metavar="DOC", help="write the table into this page")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="rounds that are kept")
    parser.add_argument("--blocks", type=int, default=default.blocks, help="blocks of 2 MiB")
    parser.add_argument(
        "--connections", type=int, default=default.connections, help="and threads of each client"
    )
    parser.add_argument("--only", choices=MEDIA, action="append", default=[], help="this medium")
    args = parser.parse_args(argv)
    try:
        if args.kept:
            kept = msgspec.json.decode(args.kept.read_bytes(), type=Kept)
        else:
            settings = Settings(
                rounds=args.rounds,
                blocks=args.blocks,
                connections=args.connections,
                only=tuple(args.only),
            )
            kept = _measured(settings)
    except (ContenderError, msgspec.MsgspecError, OSError) as error:
        print(f"kvist.bench.remotes: {error}", file=sys.stderr)
        return 2
    if args.json:
        write(kept, args.json)
    if args.page:
        args.page.write_text(written_behind(args.page.read_text(), MARK, page(kept)))
    _print(kept.outcomes)
    return 0


def _measured(settings: Settings) -> Kept:
    machine = describe_machine()
    found = measure(settings, lambda line: print(line, file=sys.stderr))
    return Kept(
        machine,
        found,
        {medium: values.ratio("put") for medium, values in found.media.items()},
        {medium: values.ratio("get") for medium, values in found.media.items()},
        load(),
    )


def page(kept: Kept) -> str:
    """The table of a run, in Markdown."""
    machine, settings = kept.machine, kept.outcomes.settings
    lines = [
        f"Medians of {settings.rounds} rounds of {settings.blocks} blocks of "
        f"{settings.block_bytes >> 20} MiB over {settings.connections} connections, Kvist and the "
        f"plain client by turns in one process, everything on one machine: {machine.cpu}, "
        f"{machine.cores} cores, Python {machine.python}, commit {machine.commit}, load "
        f"{machine.load_before} before and {kept.load_after} after. A ratio is the median of the "
        "rounds' own; above 1 Kvist is ahead.",
        "",
    ]
    rows = []
    for medium, values in kept.outcomes.media.items():
        cells = [medium, _CLIENTS[medium]]
        for way in ("put", "get"):
            cells += [f"{values.median(way, who) / _GB:.2f} GB/s" for who in (PLAIN, KVIST)]
            cells.append(f"{values.ratio(way):.2f}")
        rows.append(cells)
    lines += table(_HEADS, rows)
    lines += [
        f"\n{medium} was not measured: {why}." for medium, why in kept.outcomes.missing.items()
    ]
    return "\n".join(lines) + "\n"


def _print(found: Outcomes) -> None:
    for medium, values in found.media.items():
        for way in ("put", "get"):
            print(
                f"{medium} {way}: kvist {values.median(way, KVIST) / _GB:.2f} GB/s, plain "
                f"{values.median(way, PLAIN) / _GB:.2f} GB/s, ratio {values.ratio(way):.2f}"
            )
    for medium, why in found.missing.items():
        print(f"{medium}: not measured: {why}")


if __name__ == "__main__":
    sys.exit(main())
