"""Fig. 13: how much network between the nodes is enough."""

from __future__ import annotations

from kvist.sim.reproduce import published
from kvist.sim.reproduce.cluster import ClusterRun, System
from kvist.sim.reproduce.experiment import Experiment, Results
from kvist.sim.reproduce.outcome import Claim, Figure, Outcome, Unit


def _run(gbit: int) -> ClusterRun:
    return ClusterRun(published.SYNTHETIC, System.MOONCAKE, nic_bytes_per_s=gbit * 1e9 / 8)


def experiment() -> Experiment:
    """24 to 400 Gb/s a node on the synthetic trace."""
    return Experiment("bandwidth", [_run(g) for g in published.LINE_RATES_GBIT], _conclude)


def _conclude(results: Results) -> Outcome:
    ours = {g: results.clusters[_run(g)].ttft_s.mean for g in published.LINE_RATES_GBIT}
    limit_s = published.BANDWIDTH_TTFT_S
    knee = published.BANDWIDTH_KNEE_GBIT
    enough = all(seconds < limit_s for gbit, seconds in ours.items() if gbit >= knee)
    short = all(seconds > limit_s for gbit, seconds in ours.items() if gbit < knee)
    return Outcome(
        name="bandwidth",
        title="Bandwidth between nodes",
        source="FAST'25 Fig. 13",
        setting="Synthetic trace at its own rate, 8 prefill and 8 decode nodes, global cache.",
        figures=tuple(
            Figure(f"mean TTFT at {g} Gb/s", Unit.SECONDS, None, seconds)
            for g, seconds in ours.items()
        ),
        claims=(
            Claim(f"from {knee} Gb/s on mean TTFT is below {limit_s:g} s", enough),
            Claim(f"below {knee} Gb/s it is above {limit_s:g} s", short),
        ),
        disagreements=(
            "Mooncake fetches a prefix whenever it is long enough; here one is not fetched where "
            "computing is predicted to be faster. What collapses on a slow network is the way of "
            "the KV from the prefill to the decode node, which nothing can spare.",
        ),
    )
