"""Every policy on the same traffic: mean TTFT and goodput.

A seed draws when in its bin a request arrives, and ties of the choice. Policies that differ by
less than seeds do are run with several, the others with the first.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvist.sim.des.report import Report
from kvist.sim.des.routing_spec import RouterKind
from kvist.sim.reproduce.outcome import Claim, Figure, Outcome, Unit, over_seeds
from kvist.sim.routing.setting import ALL_TRAFFIC, BASE_NODES, Run, Traffic
from kvist.sim.routing.study import Results, Study

OTHERS = tuple(router for router in RouterKind if router is not RouterKind.KVIST)
SHOWN = tuple(RouterKind)
CLOSE = (RouterKind.CACHE_AWARE_LOCAL, RouterKind.CACHE_AWARE, RouterKind.KVIST)
SIZES = (BASE_NODES, 64)
POLICY_SEEDS = (1, 2, 3)
POLICIES = "policies"  # name of the study


class PolicyRow(msgspec.Struct, frozen=True):
    """One policy on one traffic with one seed; what is measured as in `Report`."""

    traffic: str
    nodes: int
    policy: str
    seed: int
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
        run.seed,
        report.requests,
        report.ttft_s.mean,
        report.ttft_s.p50,
        report.ttft_s.p90,
        report.ttft_s.p99,
        report.goodput_rps,
        report.hit_ratio,
    )


@dataclass(frozen=True, slots=True)
class _Comparison:
    """What `study` was asked."""

    sizes: Sequence[int]
    requests: int | None
    seeds: Sequence[int]

    def of(self, traffic: Traffic, nodes: int, router: RouterKind) -> list[Run]:
        """One policy's runs at one place."""
        seeds = self.seeds if router in CLOSE else self.seeds[:1]
        return [Run(traffic, router, nodes, requests=self.requests, seed=s) for s in seeds]


def study(
    sizes: Sequence[int] = SIZES,
    requests: int | None = None,
    seeds: Sequence[int] = POLICY_SEEDS,
) -> Study:
    """All policies on all traffic at each size of the cluster.

    Args:
        requests: only so many of each trace's first; None for all.
        seeds: of arrivals and draws; policies that are not of `CLOSE` get the first.
    """
    asked = _Comparison(sizes, requests, seeds)
    runs = [run for t in ALL_TRAFFIC for n in sizes for r in SHOWN for run in asked.of(t, n, r)]
    return Study(POLICIES, runs, lambda results: _conclude(results, asked))


def _conclude(results: Results, asked: _Comparison) -> Outcome:
    figures: list[Figure] = []
    claims: list[Claim] = []
    for traffic in ALL_TRAFFIC:
        for nodes in asked.sizes:
            found = {r: [results[run] for run in asked.of(traffic, nodes, r)] for r in SHOWN}
            figures += _figures(traffic, nodes, found)
            claims += _claims(traffic, nodes, found)
    seeds, requests = len(asked.seeds), asked.requests
    return Outcome(
        name=POLICIES,
        title="Choosing the replica",
        source="public traces, this simulator",
        setting="Replicas that prefill in chunks and decode, with a cache in HBM and 3 M tokens of "
        "DRAM each that peers may read. One gateway that knows what it booked. Every policy gets "
        "the same requests at the same times, and the same knowledge of prefixes."
        + (f" Those close to each other: means of {seeds} seeds." if seeds > 1 else "")
        + (f" The first {requests:,} requests of each trace." if requests else ""),
        figures=tuple(figures),
        claims=tuple(claims),
        disagreements=(
            "`dynamo` is its published formula with its default weights over our index, not its "
            "router; `cache-aware` is Mooncake's Algorithm 1, which `kvist` extends. `kvist` is "
            "choice and order of those that wait, as shipped; the others send at once.",
        ),
    )


def _figures(
    traffic: Traffic, nodes: int, found: Mapping[RouterKind, Sequence[Report]]
) -> list[Figure]:
    figures = []
    for router, reports in found.items():
        what = f"{traffic.name}, {nodes} nodes, {router.value}"
        figures += [
            over_seeds(f"{what}: mean TTFT", Unit.SECONDS, None, [r.ttft_s.mean for r in reports]),
            over_seeds(f"{what}: goodput", Unit.RATE, None, [r.goodput_rps for r in reports]),
            over_seeds(
                f"{what}: tokens not computed", Unit.SHARE, None, [r.hit_ratio for r in reports]
            ),
        ]
    return figures


def _claims(
    traffic: Traffic, nodes: int, found: Mapping[RouterKind, Sequence[Report]]
) -> list[Claim]:
    where = f"{traffic.name}, {nodes} nodes"
    ttfts_s = {r: statistics.fmean(one.ttft_s.mean for one in found[r]) for r in SHOWN}
    goodputs = {r: statistics.fmean(one.goodput_rps for one in found[r]) for r in SHOWN}
    ttft_s, goodput = ttfts_s[RouterKind.KVIST], goodputs[RouterKind.KVIST]
    next_s = min(ttfts_s[router] for router in OTHERS)
    next_rps = max(goodputs[router] for router in OTHERS)
    return [
        Claim(f"{where}: least mean TTFT, {next_s / ttft_s:.2f} x below the next",
              ttft_s < next_s),
        Claim(f"{where}: most goodput, {goodput / max(next_rps, 1e-9):.3f} x the next",
              goodput > next_rps),
    ]  # fmt: skip
