"""Runs what the experiments need, two processes at a time, each run once.

A process reads a trace once and keeps it. Results come in any order; an experiment is concluded as
soon as the last of its runs is there and all experiments before it are, so that what was done
stays whole when the run is broken off.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from pathlib import Path

from kvist.sim.des.report import Report
from kvist.sim.formats import read_trace
from kvist.sim.processes import processes as pool_of
from kvist.sim.reproduce.cluster import measure
from kvist.sim.reproduce.experiment import Experiment, Results, Run
from kvist.sim.reproduce.hits import HitRun, token_hit_ratio
from kvist.sim.reproduce.outcome import Outcome
from kvist.sim.traces import Trace

_LIMIT_S = 3600.0  # for all runs together


@dataclass(frozen=True, slots=True)
class Done:
    """One run and how long it took."""

    run: Run
    seconds: float


def trace_path(folder: Path, name: str) -> Path:
    """The file of a trace in the layout of `../shared/traces`."""
    return folder / "mooncake" / f"{name}_trace.jsonl"


@functools.lru_cache(maxsize=2)
def _trace(path: Path) -> Trace:
    return read_trace(path)


def _do(folder: Path, run: Run) -> tuple[float | Report, float]:
    start = time.perf_counter()
    trace = _trace(trace_path(folder, run.trace))
    result = token_hit_ratio(run, trace) if isinstance(run, HitRun) else measure(run, trace)
    return result, time.perf_counter() - start


def run_all(
    wanted: Sequence[Experiment],
    folder: Path,
    *,
    processes: int,
    progress: Callable[[Done, int, int], None],
) -> Iterator[Outcome]:
    """Concludes the experiments in their order.

    Args:
        wanted: the experiments; runs that they share are done once.
        folder: holds `mooncake/`.
        processes: at a time; 1 runs everything in this process.
        progress: gets a finished run, the number of those finished, and of all.

    Raises:
        FormatError: a trace cannot be read; names file, line and field.
        OSError: a trace cannot be read.
    """
    runs = list(dict.fromkeys(run for experiment in wanted for run in experiment.runs))
    results = Results()
    waiting = list(wanted)
    for finished, (run, result, seconds) in enumerate(_results(runs, folder, processes), 1):
        results.add(run, result)
        progress(Done(run, seconds), finished, len(runs))
        while waiting and all(results.has(r) for r in waiting[0].runs):
            yield waiting.pop(0).conclude(results)


def _results(
    runs: Sequence[Run], folder: Path, processes: int
) -> Iterator[tuple[Run, float | Report, float]]:
    if processes == 1:
        for run in runs:
            yield (run, *_do(folder, run))
        return
    with pool_of(processes) as pool:
        futures: dict[Future[tuple[float | Report, float]], Run] = {
            pool.submit(_do, folder, run): run for run in runs
        }
        for future in as_completed(futures, timeout=_LIMIT_S):
            yield (futures[future], *future.result(timeout=0))
