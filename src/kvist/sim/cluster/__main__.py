"""`python -m kvist.sim.cluster`: seeded clusters of faults, run by the production code."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

from kvist.sim.cluster.world import NODES, Verdict, run_seed
from kvist.sim.processes import processes as pool_of

_FAILED, _BAD_INPUT, _STOPPED = 1, 2, 130
_CHUNK = 4


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m kvist.sim.cluster",
        description="Plays clusters of faults; after quiet every index must equal the truth.",
        epilog="Example:\n  python -m kvist.sim.cluster --seeds 0..49",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, default=0, metavar="N", help="one run (default: 0)")
    which.add_argument("--seeds", metavar="A..B", help="these runs, B included")
    parser.add_argument(
        "--nodes", type=int, default=NODES, metavar="N", help=f"of a cluster (default: {NODES})"
    )
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="runs at a time (default: 1)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every promise was kept in every run, 1 if not, 2 for bad input, 130 if stopped."""
    args = build_parser().parse_args(arguments)
    try:
        seeds = _seeds(args.seeds) if args.seeds else range(args.seed, args.seed + 1)
        if args.nodes < 3 or args.processes < 1:
            raise ValueError("a cluster has at least 3 nodes, and runs at least one process")
    except ValueError as error:
        print(f"kvist: {error}", file=sys.stderr)
        return _BAD_INPUT
    begin_s = time.monotonic()
    done = failed = 0
    try:
        for verdict in _runs(seeds, args.nodes, args.processes):
            done += 1
            failed += not verdict.holds
            _show(verdict, briefly=len(seeds) > 1)
            if len(seeds) > 1 and sys.stderr.isatty():
                print(f"\r{done} of {len(seeds)}, {failed} failed ", end="", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"stopped after {done} of {len(seeds)} runs, {failed} failed")
        return _STOPPED
    took_s = time.monotonic() - begin_s
    print(f"{done} run{'s' * (done > 1)}, {failed} failed, {took_s:.1f} s")
    return _FAILED if failed else 0


def _seeds(text: str) -> range:
    first, _, last = text.partition("..")
    found = range(int(first), int(last) + 1)
    if not found:
        raise ValueError(f"{text} names no seed")
    return found


def _runs(seeds: range, nodes: int, processes: int) -> Iterator[Verdict]:
    play = partial(run_seed, nodes=nodes)
    if processes == 1:
        yield from map(play, seeds)
        return
    with pool_of(processes) as pool:
        yield from pool.map(play, seeds, chunksize=_CHUNK)


def _show(verdict: Verdict, *, briefly: bool) -> None:
    if verdict.holds and briefly:
        return
    print(f"seed {verdict.seed}: {'held' if verdict.holds else 'FAILED'}, trace {verdict.trace}")
    if not briefly:
        for what, count in verdict.counts.items():
            print(f"  {what} {count}")
    for violation in verdict.violations:
        print(f"  {violation}")
    if not verdict.holds:
        print(f"  repeat: {verdict.command}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
