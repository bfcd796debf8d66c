"""Fig. 5: mean TTFT by how the prefill node is chosen."""

from __future__ import annotations

from kvist.sim.des.routing_spec import RouterKind
from kvist.sim.des.spec import Scope
from kvist.sim.reproduce import published
from kvist.sim.reproduce.cluster import ClusterRun, System
from kvist.sim.reproduce.experiment import Experiment, Results
from kvist.sim.reproduce.outcome import Claim, Figure, Outcome, Unit

_WAYS = {
    "random": (RouterKind.RANDOM, Scope.LOCAL),
    "load": (RouterKind.LEAST_LOADED, Scope.LOCAL),
    "local": (RouterKind.CACHE_AWARE_LOCAL, Scope.LOCAL),
    "global": (RouterKind.CACHE_AWARE, Scope.PEERS),
}
_TITLES = {
    "random": "random",
    "load": "least load",
    "local": "cache-aware, local caches",
    "global": "cache-aware, global cache",
}


def _run(way: str) -> ClusterRun:
    router, scope = _WAYS[way]
    return ClusterRun(published.CONVERSATION, System.MOONCAKE, router=router, scope=scope)


def experiment() -> Experiment:
    """The four ways of the paper on the conversation trace."""
    return Experiment("scheduling", [_run(way) for way in _WAYS], _conclude)


def _conclude(results: Results) -> Outcome:
    ours = {way: results.clusters[_run(way)].ttft_s.mean for way in _WAYS}
    theirs = published.SCHEDULING_TTFT_S
    figures = [Figure(f"mean TTFT, {_TITLES[w]}", Unit.SECONDS, theirs[w], ours[w]) for w in _WAYS]
    figures += [
        Figure(
            f"{_TITLES[w]} over global",
            Unit.RATIO,
            theirs[w] / theirs["global"],
            ours[w] / ours["global"],
        )
        for w in _WAYS
        if w != "global"
    ]
    ranked = ours["random"] > ours["load"] > ours["local"] > ours["global"]
    return Outcome(
        name="scheduling",
        title="Choosing the prefill node",
        source="FAST'25 Fig. 5",
        setting="Conversation trace at its own rate, 8 prefill and 8 decode nodes, 3 M tokens of "
        "DRAM a node, arrivals of a 3-second bin spread over it.",
        figures=tuple(figures),
        claims=(Claim("mean TTFT: random > least load > local > global", ranked),),
        disagreements=(
            "The seconds depend on how near to saturation the prefill nodes are, and so on the "
            "efficiency constant; the order does not.",
        ),
    )
