"""`python -m kvist.bench.node [--json FILE]`: what a node costs, beside memcpy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvist.bench.machine import describe_machine
from kvist.bench.node.run import Outcomes, Settings, measure
from kvist.bench.samples import Machine, write
from kvist.bench.store.contender import ContenderError

_GB = 1e9


class Kept(msgspec.Struct, frozen=True):
    """A run as it is written to a file."""

    machine: Machine
    outcomes: Outcomes
    put_ratio: float
    get_ratio: float
    operations_rps: float
    operations_rps_of_core: float
    part: str = "node"
    schema: int = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    default = Settings()
    parser = argparse.ArgumentParser(prog="python -m kvist.bench.node", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value there")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="rounds that are kept")
    parser.add_argument("--blocks", type=int, default=default.blocks, help="blocks of 2 MiB")
    parser.add_argument(
        "--lease-blocks", type=int, default=default.lease_blocks, help="blocks that a lease moves"
    )
    parser.add_argument("--turns", type=int, default=default.turns, help="of control operations")
    args = parser.parse_args(argv)
    settings = Settings(
        rounds=args.rounds, blocks=args.blocks, lease_blocks=args.lease_blocks, turns=args.turns
    )
    machine = describe_machine()
    try:
        found = measure(settings, lambda line: print(line, file=sys.stderr))
    except ContenderError as error:
        print(f"kvist.bench.node: {error}", file=sys.stderr)
        return 2
    kept = Kept(
        machine,
        found,
        found.put_ratio,
        found.get_ratio,
        found.operations_rps,
        found.operations_rps_of_core,
    )
    if args.json:
        write(kept, args.json)
    _print(found)
    return 0


def _print(found: Outcomes) -> None:
    def middle(name: str) -> float:
        values = sorted(getattr(r, name) for r in found.rounds)
        return float(values[len(values) // 2]) / _GB

    for way, ratio in (("put", found.put_ratio), ("get", found.get_ratio)):
        print(
            f"{way}: node {middle(f'node_{way}'):.2f} GB/s, "
            f"memcpy {middle(f'memcpy_{way}'):.2f} GB/s, ratio {ratio:.2f}"
        )
    print(
        f"control: {found.operations_rps:,.0f} operations a second of one engine that waits, "
        f"{found.operations_rps_of_core:,.0f} a second of a core of the node"
    )


if __name__ == "__main__":
    sys.exit(main())
