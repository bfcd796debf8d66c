"""The comparison of policies as tables of a page of the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvist.sim.markdown import table, written_behind
from kvist.sim.routing.policies import PolicyRow

MARK = (
    "<!-- Below: written by `python -m kvist.sim.routing --page` from "
    "bench/results/routing_sim.json. -->"
)
_HEADS = ("policy", "mean TTFT", "p50", "p90", "p99", "goodput", "tokens not computed")


def with_section(page: str, rows: Sequence[PolicyRow]) -> str:
    """A page with what stands behind `MARK` written anew.

    Raises:
        ValueError: it has no such mark.
    """
    return written_behind(page, MARK, "\n".join(_tables(rows)))


def _tables(rows: Sequence[PolicyRow]) -> Iterator[str]:
    for traffic, nodes in dict.fromkeys((row.traffic, row.nodes) for row in rows):
        these = [row for row in rows if (row.traffic, row.nodes) == (traffic, nodes)]
        yield f"**{traffic}, {nodes} replicas**, {these[0].requests:,} requests\n"
        yield from table(_HEADS, map(_cells, sorted(these, key=lambda row: row.ttft_s_mean)))
        yield ""


def _cells(row: PolicyRow) -> tuple[str, ...]:
    return (
        f"`{row.policy}`",
        f"{row.ttft_s_mean:.2f} s",
        f"{row.ttft_s_p50:.2f} s",
        f"{row.ttft_s_p90:.2f} s",
        f"{row.ttft_s_p99:.2f} s",
        f"{row.goodput_rps:.3f} /s",
        f"{row.hit_ratio:.1%}",
    )
