"""All experiments, in the order of the page."""

from __future__ import annotations

from kvist.sim.reproduce import bandwidth, capacity, ratio, requests, scheduling, sharing
from kvist.sim.reproduce.experiment import Experiment


def experiments() -> tuple[Experiment, ...]:
    """Every experiment; the names are those of `--only`."""
    return (
        capacity.experiment(),
        requests.capacity_experiment(),
        requests.prefill_experiment(),
        scheduling.experiment(),
        sharing.experiment(),
        ratio.experiment(),
        bandwidth.experiment(),
    )
