"""Every policy on the same traffic: mean TTFT and goodput."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvist.sim.des.report import Report
from kvist.sim.des.routing_spec import RouterKind
from kvist.sim.reproduce.outcome import Claim, Figure, Outcome, Unit
from kvist.sim.routing.setting import ALL_TRAFFIC, BASE_NODES, SEED, Run, Traffic
from kvist.sim.routing.study import Results, Study

OTHERS = tuple(router for router in RouterKind if router is not RouterKind.KVIST)
SHOWN = tuple(RouterKind)
SIZES = (BASE_NODES, 64)
POLICIES = "policies"  # name of the study


class PolicyRow(msgspec.Struct, frozen=True):
    """One policy on one traffic; what is measured as in `Report`."""

    traffic: str
    nodes: int
    policy: str
    requests: int
    ttft_s_mean: float
    ttft_s_p50: float
    ttft_s_p90: float
    ttft_s_p99: float
    goodput_rps: float
    hit_ratio: float


def rows(runs: Sequence[Run], results: Results) -> list[PolicyRow]:
    """The runs of `study` as rows, in their order."""
    return [_row(run, results[run]) for run in runs]


def _row(run: Run, report: Report) -> PolicyRow:
    return PolicyRow(
        run.traffic.name,
        run.nodes,
        run.router.value,
        report.requests,
        report.ttft_s.mean,
        report.ttft_s.p50,
        report.ttft_s.p90,
        report.ttft_s.p99,
        report.goodput_rps,
        report.hit_ratio,
    )


def study(sizes: Sequence[int] = SIZES, requests: int | None = None, seed: int = SEED) -> Study:
    """All policies on all traffic at each size of the cluster.

    Args:
        requests: only so many of each trace's first; None for all.
        seed: of arrivals and draws.
    """
    runs = [
        Run(t, r, n, requests=requests, seed=seed)
        for t in ALL_TRAFFIC
        for n in sizes
        for r in SHOWN
    ]
    return Study(POLICIES, runs, lambda results: _conclude(results, sizes, requests, seed))


def _conclude(results: Results, sizes: Sequence[int], requests: int | None, seed: int) -> Outcome:
    figures: list[Figure] = []
    claims: list[Claim] = []
    for traffic in ALL_TRAFFIC:
        for nodes in sizes:
            runs = {r: Run(traffic, r, nodes, requests=requests, seed=seed) for r in SHOWN}
            found = {router: results[run] for router, run in runs.items()}
            figures += _figures(traffic, nodes, found)
            claims += _claims(traffic, nodes, found)
    return Outcome(
        name=POLICIES,
        title="Choosing the replica",
        source="public traces, this simulator",
        setting="Replicas that prefill in chunks and decode, with a cache in HBM and 3 M tokens of "
        "DRAM each that peers may read. One gateway that knows what it booked. Every policy gets "
        "the same requests at the same times, and the same knowledge of prefixes."
        + (f" The first {requests:,} requests of each trace." if requests else ""),
        figures=tuple(figures),
        claims=tuple(claims),
        disagreements=(
            "`dynamo` is its published formula with its default weights over our index, not its "
            "router; `cache-aware` is Mooncake's Algorithm 1, which `kvist` extends. `kvist` is "
            "choice and order of those that wait, as shipped; the others send at once.",
        ),
    )


def _figures(traffic: Traffic, nodes: int, found: dict[RouterKind, Report]) -> list[Figure]:
    figures = []
    for router, report in found.items():
        what = f"{traffic.name}, {nodes} nodes, {router.value}"
        figures += [
            Figure(f"{what}: mean TTFT", Unit.SECONDS, None, report.ttft_s.mean),
            Figure(f"{what}: goodput", Unit.RATE, None, report.goodput_rps),
            Figure(f"{what}: tokens not computed", Unit.SHARE, None, report.hit_ratio),
        ]
    return figures


def _claims(traffic: Traffic, nodes: int, found: dict[RouterKind, Report]) -> list[Claim]:
    ours = found[RouterKind.KVIST]
    where = f"{traffic.name}, {nodes} nodes"
    ttft_s = min(found[router].ttft_s.mean for router in OTHERS)
    goodput = max(found[router].goodput_rps for router in OTHERS)
    return [
        Claim(f"{where}: least mean TTFT, {ttft_s / ours.ttft_s.mean:.2f} x below the next",
              ours.ttft_s.mean < ttft_s),
        Claim(f"{where}: most goodput, {ours.goodput_rps / max(goodput, 1e-9):.3f} x the next",
              ours.goodput_rps > goodput),
    ]  # fmt: skip
