"""The shape of a study, and what runs its runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvist.sim.des.report import Report
from kvist.sim.formats import read_trace
from kvist.sim.reproduce.outcome import Outcome
from kvist.sim.routing.setting import Run, measure
from kvist.sim.traces import Trace

Results = Mapping[Run, Report]
Progress = Callable[[Run, Report, float], None]


@dataclass(frozen=True, slots=True)
class Study:
    """A question: the runs that it needs, and what it concludes from them."""

    name: str
    runs: Sequence[Run]
    conclude: Callable[[Results], Outcome]


def run_all(
    studies: Sequence[Study], folder: Path, progress: Progress
) -> Iterator[tuple[Outcome, Results]]:
    """Concludes the studies in their order; runs that they share are done once.

    Args:
        folder: of the traces.
        progress: gets a finished run, its report and its seconds.

    Raises:
        FormatError: a trace cannot be read; names file, line and field.
        OSError: likewise.
    """
    traces: dict[str, Trace] = {}
    results: dict[Run, Report] = {}
    for study in studies:
        for run in study.runs:
            if run in results:
                continue
            file = run.traffic.file
            if file not in traces:
                traces[file] = read_trace(folder / file)
            start = time.perf_counter()
            results[run] = measure(run, traces[file])
            progress(run, results[run], time.perf_counter() - start)
        yield study.conclude(results), results
