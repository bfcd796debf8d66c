"""`python -m kvist.bench.gateway [--json FILE]`: a gateway beside going to the engine directly."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvist.bench.gateway.processes import BenchError
from kvist.bench.gateway.run import Outcomes, Settings, measure
from kvist.bench.machine import describe_machine
from kvist.bench.samples import Machine, write

_MS = 1e3
_MIB = 1 << 20


class Kept(msgspec.Struct, frozen=True):
    """A run as it is written to a file."""

    machine: Machine
    outcomes: Outcomes
    part: str = "gateway"
    schema: int = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    default = Settings()
    parser = argparse.ArgumentParser(prog="python -m kvist.bench.gateway", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value there")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="rounds of requests")
    parser.add_argument("--requests", type=int, default=default.requests, help="in each round")
    parser.add_argument("--streams", type=int, default=default.streams, help="idle streams")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="read prompts with this model's tokenizer"
    )
    args = parser.parse_args(argv)
    reads = args.tokenizer.name if args.tokenizer else ""
    settings = Settings(
        rounds=args.rounds, requests=args.requests, streams=args.streams, tokenizer=reads
    )
    machine = describe_machine()
    try:
        found = measure(
            settings, lambda line: print(line, file=sys.stderr), tokenizer=args.tokenizer
        )
    except (BenchError, TimeoutError) as error:
        print(f"kvist.bench.gateway: {error}", file=sys.stderr)
        return 2
    if args.json:
        write(Kept(machine, found), args.json)
    _print(found)
    return 0


def _print(found: Outcomes) -> None:
    settings = found.settings
    cpu_s = sum(r.cpu_s_per_request for r in found.added) / len(found.added)
    print(
        f"{settings.rate_rps:.0f} requests a second: TTFT + {found.added_p50_s() * _MS:.2f} ms "
        f"(median), + {found.added_p99_s() * _MS:.2f} ms (p99); {cpu_s * _MS:.2f} ms of a core "
        f"for a request of {settings.tokens} tokens"
    )
    if found.hearing is not None:
        heard = found.hearing
        print(
            f"{heard.blocks_per_s:.0f} blocks of engines' events a second: TTFT "
            f"{statistics.median(heard.added_p50_s) * _MS:+.2f} ms (median), "
            f"{statistics.median(heard.added_p99_s) * _MS:+.2f} ms (p99); {heard.cores:.2f} cores"
        )
    if found.idle is not None:
        idle = found.idle
        each = (idle.after_bytes - idle.before_bytes) / idle.streams
        print(
            f"{idle.streams} idle streams: {idle.after_bytes / _MIB:.0f} MiB, "
            f"{each / 1024:.1f} KiB each"
        )
    if found.slow is not None:
        slow = found.slow
        print(
            f"{slow.stalled} clients that read nothing or a byte a second: TTFT of the others "
            f"{slow.p50_s / slow.quiet_p50_s:.2f} (median) and {slow.p99_s / slow.quiet_p99_s:.2f} "
            f"(p99) of what it is without them; {slow.grown_bytes / _MIB:.1f} MiB more"
        )


if __name__ == "__main__":
    sys.exit(main())
