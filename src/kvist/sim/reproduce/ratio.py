"""Fig. 15: how many of sixteen nodes should do the prefills."""

from __future__ import annotations

from kvist.sim.des.spec import Slo
from kvist.sim.reproduce import published
from kvist.sim.reproduce.cluster import ClusterRun, System
from kvist.sim.reproduce.experiment import Experiment, Results
from kvist.sim.reproduce.outcome import Claim, Figure, Outcome, Unit

_BALANCED = (6, 7, 8, 9, 10)
_SLO = Slo(*published.RATIO_LIMITS_S)


def _run(prefill_nodes: int) -> ClusterRun:
    return ClusterRun(
        published.SYNTHETIC,
        System.MOONCAKE,
        prefill_nodes=prefill_nodes,
        decode_nodes=published.NODES - prefill_nodes,
    )


def experiment() -> Experiment:
    """Five to eleven prefill nodes on the synthetic trace."""
    return Experiment("ratio", [_run(nodes) for nodes in published.RATIO_SHARES], _conclude)


def _conclude(results: Results) -> Outcome:
    ours = {
        nodes: results.clusters[_run(nodes)].effective(_SLO) for nodes in published.RATIO_SHARES
    }
    figures = [
        Figure(f"{n}P{published.NODES - n}D: requests within 10 s, 100 ms", Unit.SHARE, paper,
               ours[n])
        for n, paper in published.RATIO_SHARES.items()
    ]  # fmt: skip
    best = max(ours, key=lambda n: ours[n])
    return Outcome(
        name="ratio",
        title="Prefill to decode nodes",
        source="FAST'25 Fig. 15",
        setting="Synthetic trace at its own rate, sixteen nodes, TTFT within 10 s and TBT within "
        "100 ms.",
        figures=tuple(figures),
        claims=(
            Claim(f"the best ratio is near 1:1 (ours: {best}P{published.NODES - best}D)",
                  best in _BALANCED),
            Claim("few prefill nodes lose requests to TTFT", ours[min(ours)] < ours[best]),
        ),
        disagreements=(
            "Few decode nodes lose almost nothing here, where the paper has 86 % at 11P5D: the "
            "decode nodes of the model keep up with longer batches than theirs did.",
        ),
    )  # fmt: skip
