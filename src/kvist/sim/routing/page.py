"""What the studies of admission and of policies found, as tables of a page of the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from kvist.sim.markdown import table, written_behind, written_between
from kvist.sim.routing.overload import PUBLISHED_REJECTED, PUBLISHED_REQUESTS, RULES, RuleRow
from kvist.sim.routing.policies import PolicyRow

RULES_MARK = "<!-- Down to the next mark: written by `python -m kvist.sim.routing --page`. -->"
RULES_END = "<!-- Written by hand again. -->"
MARK = (
    "<!-- Below: written by `python -m kvist.sim.routing --page` from "
    "bench/results/routing_sim.json. -->"
)
_RULE_HEADS = (
    "rule",
    "rejected, paper",
    "rejected",
    "of these, computed for nothing",
    "goodput",
    "swing of prefill against decode, requests",
    "correlation",
)
_HEADS = ("policy", "mean TTFT", "p50", "p90", "p99", "goodput", "tokens not computed")


def with_rules(page: str, rows: Sequence[RuleRow]) -> str:
    """A page with what stands between `RULES_MARK` and `RULES_END` written anew.

    Raises:
        ValueError: it has no such marks.
    """
    return written_between(page, RULES_MARK, RULES_END, "\n".join(_rules(rows)))


def with_section(page: str, rows: Sequence[PolicyRow]) -> str:
    """A page with what stands behind `MARK` written anew.

    Raises:
        ValueError: it has no such mark.
    """
    return written_behind(page, MARK, "\n".join(_tables(rows)))


def _rules(rows: Sequence[RuleRow]) -> Iterator[str]:
    by_rule = {rule: [row for row in rows if row.rule == rule.value] for rule in RULES}
    yield from table(
        _RULE_HEADS,
        (
            (
                f"`{rule.value}`",
                f"{PUBLISHED_REJECTED[rule] / PUBLISHED_REQUESTS:.1%}",
                f"{_spread([100 * r.rejected_ratio for r in found], 1)} %",
                _spread([r.late for r in found], 0),
                f"{_spread([r.goodput_rps for r in found], 2)} /s",
                _spread([r.swing_requests for r in found], 1),
                _spread([r.correlation for r in found], 2),
            )
            for rule, found in by_rule.items()
        ),
    )


def _tables(rows: Sequence[PolicyRow]) -> Iterator[str]:
    for traffic, nodes in dict.fromkeys((row.traffic, row.nodes) for row in rows):
        these = [row for row in rows if (row.traffic, row.nodes) == (traffic, nodes)]
        yield f"**{traffic}, {nodes} replicas**, {these[0].requests:,} requests\n"
        by_policy: dict[str, list[PolicyRow]] = {}
        for row in these:
            by_policy.setdefault(row.policy, []).append(row)
        ordered = sorted(by_policy.values(), key=lambda seeds: fmean(r.ttft_s_mean for r in seeds))
        yield from table(_HEADS, map(_cells, ordered))
        yield ""


def _cells(seeds: Sequence[PolicyRow]) -> tuple[str, ...]:
    """A policy's line: means over its seeds."""
    return (
        f"`{seeds[0].policy}`",
        f"{_spread([r.ttft_s_mean for r in seeds], 2)} s",
        f"{fmean(r.ttft_s_p50 for r in seeds):.2f} s",
        f"{fmean(r.ttft_s_p90 for r in seeds):.2f} s",
        f"{fmean(r.ttft_s_p99 for r in seeds):.2f} s",
        f"{_spread([r.goodput_rps for r in seeds], 3)} /s",
        f"{fmean(r.hit_ratio for r in seeds):.1%}",
    )


def _spread(values: Sequence[float], places: int) -> str:
    """The mean, with the least and the greatest where there are several."""
    mean = f"{fmean(values):.{places}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.{places}f} … {max(values):.{places}f})"
