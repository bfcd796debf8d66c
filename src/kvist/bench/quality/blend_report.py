"""Blend's samples as rows, and the rows as a table."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvist.bench.quality.report import Grid, codec_grid, digits, nats, share
from kvist.bench.quality.samples import BlendRow, BlendSample, Result, SampleLog

FULL = "full"
PREFIX_ONLY = "prefix-only"
NAIVE = "0"


def blend_rows(ways: Sequence[str], log: SampleLog) -> list[BlendRow]:
    """A row for each way that was measured; reuse of a prefix only beside the full prefill.

    Every prompt begins with the same introduction, so that is all that prefix-only reuse finds; it
    says what a full prefill says.
    """
    rows = []
    for way in ways:
        samples = log.blended(way)
        if not samples:
            continue
        rows.append(_row(way, samples))
        if way == FULL:
            computed = _over(samples, [s.cached_tokens + s.question_tokens for s in samples])
            rows.append(msgspec.structs.replace(rows[-1], way=PREFIX_ONLY, computed_ratio=computed))
    return rows


def _row(way: str, samples: Sequence[BlendSample]) -> BlendRow:
    kl = np.array([value for s in samples for value in s.kl_nats])
    judged = [(s.f1, s.exact) for s in samples if s.f1 is not None and s.exact is not None]
    # A repair computes more in its first layers than in its last: a ratio is the mean of them.
    fresh = [
        s.tokens if way == FULL else float(way) * s.cached_tokens + s.question_tokens
        for s in samples
    ]
    answered = sum(s.greedy_tokens for s in samples)
    return BlendRow(
        way=way,
        prompts=len(samples),
        positions=len(kl),
        computed_ratio=_over(samples, fresh),
        kl_nats_mean=digits(float(np.mean(kl)), 4),
        kl_nats_p95=digits(float(np.quantile(kl, 0.95, method="higher")), 4),
        kl_nats_answer=digits(float(np.mean([s.kl_nats[-1] for s in samples])), 4),
        top1_ratio=digits(sum(s.same_top for s in samples) / len(kl), 5),
        greedy_ratio=digits(sum(s.greedy_same_tokens for s in samples) / answered, 5),
        questions=len(judged),
        f1=digits(sum(f for f, _ in judged) / len(judged), 4) if judged else None,
        exact_ratio=digits(sum(e for _, e in judged) / len(judged), 4) if judged else None,
    )


def _over(samples: Sequence[BlendSample], tokens: Sequence[float]) -> float:
    return digits(sum(tokens) / sum(s.tokens for s in samples), 4)


def removed_ratio(row: BlendRow, rows: Sequence[BlendRow]) -> float | None:
    """The share of naive concatenation's KL that a row does without; `None` without such a row."""
    naive = next((r.kl_nats_mean for r in rows if r.way == NAIVE), 0.0)
    return 1 - row.kl_nats_mean / naive if naive else None


def blend_grid(rows: Sequence[BlendRow]) -> Grid:
    """Ways to serve a prompt of passages that were each cached alone."""
    asked = any(row.questions for row in rows)
    columns = ["way", "computed", "KL mean", "removed", "KL p95", "KL at answer", "same top"]
    columns += ["same greedy", *(["F1", "exact"] if asked else [])]
    cells = []
    for row in rows:
        line = [
            "0 (naive)" if row.way == NAIVE else row.way,
            share(row.computed_ratio),
            nats(row.kl_nats_mean),
            share(removed_ratio(row, rows)),
            nats(row.kl_nats_p95),
            nats(row.kl_nats_answer),
            share(row.top1_ratio),
            share(row.greedy_ratio),
        ]
        cells.append(line + ([share(row.f1), share(row.exact_ratio)] if asked else []))
    return Grid("Blend: passages cached each alone, by the share computed again", columns, cells)


def grids(result: Result) -> list[Grid]:
    """Every table of a result."""
    found = [codec_grid(result)] if result.codecs else []
    return found + ([blend_grid(result.blend)] if result.blend else [])
