"""`python -m kvist.bench.directory`: what the cluster's directory takes and how fast it answers.

A request of 128 k tokens is 8,192 keys of 16 tokens. A look-up says for each node how much of it
that node holds from its start. Times are the median of many, beside the Python twin.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from kvist.cluster.directory import Directory
from kvist.cluster.wire import Batch
from kvist.core.events import Cleared, Stored
from kvist.core.keys import Key
from kvist.core.outcome import Tier
from kvist.native import IMPLEMENTATION
from kvist.native.owner_twin import OwnerTable

REQUEST_KEYS = 8192
_ROUNDS = 31
_BATCH_KEYS = 64


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kvist.bench.directory")
    parser.add_argument("--nodes", type=int, default=50, metavar="N", help="default: 50")
    parser.add_argument(
        "--blocks", type=int, default=20_000, metavar="N", help="of a node (default: 20000)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and prints a line a figure."""
    args = build_parser().parse_args(arguments)
    rng = random.Random(0)
    request = [rng.randbytes(32) for _ in range(REQUEST_KEYS)]
    directory = Directory()
    begin_s, before_bytes = time.perf_counter(), directory.memory_bytes
    for node in range(args.nodes):
        part = request[: REQUEST_KEYS * (node + 1) // args.nodes]
        _hear(directory, f"n{node}", _filled(rng, part, args.blocks))
    took_s = time.perf_counter() - begin_s
    facts = args.nodes * args.blocks
    print(f"table                        {IMPLEMENTATION}")
    print(f"keys, holders                {len(directory)}, {args.nodes} nodes")
    print(f"events applied               {facts / took_s / 1e6:.2f} M blocks/s")
    size_bytes = directory.memory_bytes - before_bytes
    print(f"memory                       {size_bytes / len(directory):.1f} bytes a key")
    print(f"look-up of 8192 keys         {_median_us(lambda: directory.reach(request)):.0f} us")
    cold = [rng.randbytes(32) for _ in range(REQUEST_KEYS)]
    print(f"  that nobody holds          {_median_us(lambda: directory.reach(cold)):.0f} us")
    shared = Directory()
    for node in range(args.nodes):
        _hear(shared, f"n{node}", request)
    print(f"  that all nodes hold        {_median_us(lambda: shared.reach(request)):.0f} us")
    plain = OwnerTable(1 << 23)
    for node in range(args.nodes):
        plain.add(node, 1, request[: REQUEST_KEYS * (node + 1) // args.nodes])
    print(f"  in the Python twin         {_median_us(lambda: plain.runs(request)):.0f} us")
    print(
        f"holders of one key           {_median_us(lambda: directory.holders(request[0])):.1f} us"
    )
    begin_s = time.perf_counter()
    directory.drop("n0")
    print(f"a node that is gone          {(time.perf_counter() - begin_s) * 1e6:.0f} us")
    return 0


def _filled(rng: random.Random, part: list[Key], blocks: int) -> list[Key]:
    """A part of the request and keys of the node's own."""
    return part + [rng.randbytes(32) for _ in range(max(0, blocks - len(part)))]


def _hear(directory: Directory, node: str, keys: list[Key]) -> None:
    directory.take(Batch(node, 1, 0, (Cleared(),)), 0.0)
    for number, first in enumerate(range(0, len(keys), _BATCH_KEYS), 1):
        event = Stored(tuple(keys[first : first + _BATCH_KEYS]), None, Tier.DRAM)
        directory.take(Batch(node, 1, number, (event,)), 0.0)


def _median_us(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        begin_s = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin_s) * 1e6)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
