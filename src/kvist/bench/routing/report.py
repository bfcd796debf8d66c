"""A run as figures: policies beside `kvist` in the same round, for terminal and page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvist.bench.routing.play import Answer
from kvist.bench.routing.run import Outcomes, Play
from kvist.bench.routing.stream import Kind
from kvist.sim.markdown import table, written_behind

OURS = "kvist"
MARK = (
    "<!-- Below: written by `python -m kvist.bench.routing --page` from "
    "bench/results/routing.json. -->"
)
HEADS = (
    *("policy", "mean TTFT", "median", "p90", "mean ÷ kvist's", "p90 ÷ kvist's"),
    *("agents, mean ÷", "RAG, mean ÷", "tokens cached", "least of a replica"),
)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds to the first token of some answers."""

    mean_s: float
    p50_s: float
    p90_s: float

    @classmethod
    def of(cls, served: Sequence[Answer]) -> Times:
        """Nearest-rank quantiles; there is at least one answer."""
        ordered = sorted(answer.ttft_s for answer in served)

        def rank(ratio: float) -> float:
            return ordered[max(0, math.ceil(ratio * len(ordered)) - 1)]

        return cls(statistics.fmean(ordered), rank(0.5), rank(0.9))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the rounds, with the least and the greatest."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        """There is at least one."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.value:.2f}× ({self.low:.2f}–{self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Row:
    """One policy. Times are medians of the rounds; ratios are of two plays of one round.

    Attributes:
        mean, p90: over all requests.
        agents, rag: of the means of these alone.
        cached_ratio: of prompt tokens, those that an engine found in its cache.
        least_ratio: requests of the replica that got fewest, over an equal share.
    """

    policy: str
    times: Times
    mean: Ratio
    p90: Ratio
    agents: Ratio | None
    rag: Ratio | None
    cached_ratio: float
    least_ratio: float


def rows(found: Outcomes) -> Iterator[Row]:
    """Every policy in the order of the settings; none before a round has `kvist` and it."""
    ours = {p.round: p for p in found.plays if p.policy == OURS}
    for policy in found.settings.policies:
        pairs = [(p, ours[p.round]) for p in found.plays if p.policy == policy and p.round in ours]
        if pairs:
            yield _row(policy, pairs, found.settings.replicas)


def _row(policy: str, pairs: Sequence[tuple[Play, Play]], replicas: int) -> Row:
    times = [(Times.of(p.answers), Times.of(k.answers)) for p, k in pairs]
    mine = [own for own, _ in times]
    served = [answer for p, _ in pairs for answer in p.answers]
    prompts = sum(answer.prompt_tokens for answer in served)
    return Row(
        policy,
        Times(
            statistics.median(t.mean_s for t in mine),
            statistics.median(t.p50_s for t in mine),
            statistics.median(t.p90_s for t in mine),
        ),
        Ratio.of([own.mean_s / kvists.mean_s for own, kvists in times]),
        Ratio.of([own.p90_s / kvists.p90_s for own, kvists in times]),
        _of_kind(Kind.AGENT, pairs),
        _of_kind(Kind.RAG, pairs),
        sum(answer.cached_tokens for answer in served) / max(1, prompts),
        min(_least(p.answers, replicas) for p, _ in pairs),
    )


def _of_kind(kind: Kind, pairs: Sequence[tuple[Play, Play]]) -> Ratio | None:
    ratios = []
    for both in pairs:
        own, kvists = ([a for a in play.answers if a.kind is kind] for play in both)
        if own and kvists:
            ratios.append(Times.of(own).mean_s / Times.of(kvists).mean_s)
    return Ratio.of(ratios) if ratios else None


def _least(served: Sequence[Answer], replicas: int) -> float:
    counts = [0] * replicas
    for answer in served:
        counts[answer.replica] += 1
    return min(counts) * replicas / len(served)


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, as `HEADS` names it."""
    return (
        row.policy,
        *(f"{seconds:.2f} s" for seconds in (row.times.mean_s, row.times.p50_s, row.times.p90_s)),
        *(str(row.mean), str(row.p90), str(row.agents or "–"), str(row.rag or "–")),
        f"{row.cached_ratio:.0%}",
        f"{row.least_ratio:.0%} of its share",
    )


def section(found: Outcomes) -> str:
    """What stands behind `MARK` in the page."""
    machine, settings = found.machine, found.settings
    requests = len(found.plays[0].answers) if found.plays else 0
    parts = [
        f"{settings.replicas} replicas of {found.engine}, {settings.kv_tokens:,} tokens of KV "
        f"each; {requests} requests a play ({found.texts}: up to {settings.sessions} agents of up "
        f"to {settings.turns} turns, {settings.questions} questions about {settings.documents} "
        f"documents), at {settings.load_ratio:g} times the rate that the replicas could serve "
        "without a cache. Every policy served the same requests at the same times in each of "
        f"{settings.rounds} rounds, behind a gateway of its own, with nothing cached that another "
        "left; ratios are of one round: median, least and greatest. "
        f"{machine.cpu}, {machine.cores} cores, Python {machine.python}, commit {machine.commit}, "
        f"load {machine.load_before} before and {machine.load_after} after.",
        "",
        *table(HEADS, map(cells, rows(found))),
    ]
    return "\n".join(parts) + "\n"


def with_section(page: str, found: Outcomes) -> str:
    """A page with what stands behind `MARK` written anew.

    Raises:
        ValueError: it has no such mark.
    """
    return written_behind(page, MARK, section(found))
