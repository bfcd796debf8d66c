"""`python -m kvist.bench.peers [--json FILE]`: node to node over TCP, beside a plain socket."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvist.bench.between.run import NODES, SOCKET, Outcomes, Settings, measure
from kvist.bench.machine import describe_machine
from kvist.bench.samples import Machine, write
from kvist.bench.store.contender import ContenderError

_GB = 1e9


class Kept(msgspec.Struct, frozen=True):
    """A run as it is written to a file."""

    machine: Machine
    outcomes: Outcomes
    ratio_to_socket: dict[str, float]
    part: str = "peers"
    schema: int = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    default = Settings()
    parser = argparse.ArgumentParser(prog="python -m kvist.bench.peers", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value there")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="rounds that are kept")
    parser.add_argument("--blocks", type=int, default=default.blocks, help="blocks of 2 MiB")
    parser.add_argument("--streams", type=int, default=default.streams, help="connections")
    parser.add_argument(
        "--nixl", action="store_true", help="also two nodes whose blocks travel by NIXL"
    )
    parser.add_argument(
        "--alone", action="store_true", help="without Redis and Mooncake, where they are installed"
    )
    args = parser.parse_args(argv)
    settings = Settings(
        rounds=args.rounds,
        blocks=args.blocks,
        streams=args.streams,
        peers=not args.alone,
        nixl=args.nixl,
    )
    machine = describe_machine()
    try:
        found = measure(settings, lambda line: print(line, file=sys.stderr))
    except ContenderError as error:
        print(f"kvist.bench.peers: {error}", file=sys.stderr)
        return 2
    ratios = {way: found.ratio(way) for way in found.rounds}
    if args.json:
        write(Kept(machine, found, ratios), args.json)
    _print(found)
    return 0


def _print(found: Outcomes) -> None:
    for way in found.rounds:
        beside = "" if way == SOCKET else f", {found.ratio(way):.2f} of a plain socket"
        if way not in (SOCKET, NODES):
            beside += f"; kvist brings {found.ratio(NODES, way):.2f} times as much"
        print(f"{way}: {found.bytes_per_s(way) / _GB:.2f} GB/s{beside}")
    for way, why in found.missing.items():
        print(f"{way}: not measured: {why}")


if __name__ == "__main__":
    sys.exit(main())
