"""`python -m kvist.sim.reproduce`: Mooncake's experiments from its public traces."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvist import __version__
from kvist.core.errors import ConfigError, KvistError
from kvist.sim.reproduce import published
from kvist.sim.reproduce.catalogue import experiments
from kvist.sim.reproduce.cluster import EFFICIENCY, SEED
from kvist.sim.reproduce.experiment import Experiment
from kvist.sim.reproduce.outcome import Outcome
from kvist.sim.reproduce.page import write_page, write_section
from kvist.sim.reproduce.runner import Done, run_all, trace_path

_TRACES = Path("../shared/traces")
_JSON = Path("bench/results/reproduce.json")
_PAGE = Path("docs/reproduce.md")
_FAILED, _BAD_INPUT, _INTERRUPTED = 1, 2, 130


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m kvist.sim.reproduce",
        description="Mooncake's published experiments in the simulator, from its public traces.",
        epilog="Example:\n  python -m kvist.sim.reproduce --only capacity",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--traces",
        type=Path,
        default=_TRACES,
        metavar="DIR",
        help=f"folder with mooncake/NAME_trace.jsonl (default: {_TRACES})",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help=f"run only this; may be repeated: {', '.join(e.name for e in experiments())}",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help=f"write the figures (default: {_JSON})"
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help=f"write a page (default: {_PAGE})"
    )
    parser.add_argument(
        "--processes", type=int, default=2, metavar="N", help="runs at a time (default: 2)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiments; 0 if all hold, 1 if one does not, 2 for bad input, 130 at Ctrl-C."""
    args = build_parser().parse_args(arguments)
    try:
        wanted = _wanted(args.only)
        _check(args, wanted)
        return _run(args, wanted)
    except (KvistError, OSError) as error:
        print(f"kvist: {error}", file=sys.stderr)
        return _BAD_INPUT


def _wanted(names: Sequence[str] | None) -> list[Experiment]:
    known = {experiment.name: experiment for experiment in experiments()}
    for name in names or ():
        if name not in known:
            raise ConfigError(
                f"there is no experiment {name!r}", path="--only", remedy=f"take {', '.join(known)}"
            )
    return [known[name] for name in known if not names or name in names]


def _check(args: argparse.Namespace, wanted: Sequence[Experiment]) -> None:
    if args.processes < 1:
        raise ConfigError(f"must be at least 1, not {args.processes}", path="--processes")
    for name in sorted({run.trace for experiment in wanted for run in experiment.runs}):
        if not trace_path(args.traces, name).is_file():
            raise ConfigError(
                f"{trace_path(args.traces, name)} is not there",
                path="--traces",
                remedy="give a folder with Mooncake's FAST'25 traces as mooncake/NAME_trace.jsonl",
            )


def _run(args: argparse.Namespace, wanted: Sequence[Experiment]) -> int:
    # A part of the experiments does not overwrite the page of all.
    json_file = args.json or (None if args.only else _JSON)
    page_file = args.page or (None if args.only else _PAGE)
    outcomes: list[Outcome] = []
    start = time.monotonic()

    def keep() -> None:
        complete = len(outcomes) == len(wanted)
        minutes = (time.monotonic() - start) / 60
        if json_file is not None:
            _write(json_file, json.dumps(_record(outcomes, complete=complete), indent=1) + "\n")
        if page_file is not None:
            _write(page_file, write_page(outcomes, complete=complete, minutes=minutes))

    try:
        for outcome in run_all(wanted, args.traces, processes=args.processes, progress=_progress):
            outcomes.append(outcome)
            print(write_section(outcome), flush=True)
            keep()
    except KeyboardInterrupt:
        kept = f"; kept in {json_file}" if json_file is not None and outcomes else ""
        print(f"kvist: broken off after {len(outcomes)} experiments{kept}", file=sys.stderr)
        return _INTERRUPTED
    return 0 if all(outcome.holds for outcome in outcomes) else _FAILED


def _progress(done: Done, finished: int, total: int) -> None:
    line = f"[{finished}/{total}] {done.run.label}: {done.seconds:.1f} s"
    print(line, file=sys.stderr, flush=True)


def _record(outcomes: Sequence[Outcome], *, complete: bool) -> dict[str, Any]:
    return {
        "kvist": __version__,
        "complete": complete,
        "efficiency": EFFICIENCY,
        "seed": SEED,
        "testbed": {
            "model": published.MODEL,
            "device": published.DEVICE,
            "devices_per_node": published.DEVICES_PER_NODE,
            "pool_tokens": published.POOL_TOKENS,
        },
        "experiments": [
            {
                "name": outcome.name,
                "source": outcome.source,
                "holds": outcome.holds,
                "figures": [
                    {
                        "what": figure.what,
                        "unit": figure.unit.value,
                        "paper": figure.paper,
                        "ours": figure.ours if abs(figure.ours) < float("inf") else None,
                        "held": figure.held,
                        "verdict": figure.verdict.value,
                    }
                    for figure in outcome.figures
                ],
                "claims": [{"text": c.text, "holds": c.holds} for c in outcome.claims],
            }
            for outcome in outcomes
        ],
    }


def _write(path: Path, text: str) -> None:
    """Writes beside the file and renames: whoever reads sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
