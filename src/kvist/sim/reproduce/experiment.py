"""The shape of an experiment: the runs that it needs, and what it concludes from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvist.sim.des.report import Report
from kvist.sim.reproduce.cluster import ClusterRun
from kvist.sim.reproduce.hits import HitRun
from kvist.sim.reproduce.outcome import Outcome

Run = HitRun | ClusterRun


class Results:
    """What runs gave, by the run; filled as they finish."""

    def __init__(self) -> None:
        self.hits: dict[HitRun, float] = {}
        self.clusters: dict[ClusterRun, Report] = {}

    def add(self, run: Run, result: float | Report) -> None:
        """Keeps the result of a run: a token hit ratio of a replay, or what a cluster measured."""
        if isinstance(run, HitRun) and isinstance(result, float):
            self.hits[run] = result
        elif isinstance(run, ClusterRun) and isinstance(result, Report):
            self.clusters[run] = result
        else:
            raise TypeError(f"{type(result).__name__} is no result of {run}")

    def has(self, run: Run) -> bool:
        """Whether a run is finished."""
        return run in self.hits or run in self.clusters


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment; `conclude` gets at least the results of `runs`."""

    name: str
    runs: Sequence[Run]
    conclude: Callable[[Results], Outcome]
