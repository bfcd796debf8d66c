"""Draws a result: size against divergence of codecs, and blend's curve. Needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvist.bench.quality.blend_report import FULL, PREFIX_ONLY
from kvist.bench.quality.report import size_ratio
from kvist.bench.quality.samples import BlendRow, CodecRow, Result


def draw(result: Result, path: Path) -> None:
    """Draws `result` into `path`.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.figure import Figure

    panels = [(_codecs, result.codecs)] if result.codecs or not result.blend else []
    shown: list[tuple[Any, Any]] = [*panels, *([(_blend, result.blend)] if result.blend else [])]
    figure = Figure(figsize=(8 * len(shown), 5), layout="constrained")
    for axes, (panel, rows) in zip(
        figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True
    ):
        panel(axes, rows)
    figure.suptitle(result.settings.model)
    figure.savefig(path)


def frontier(rows: Sequence[CodecRow]) -> list[CodecRow]:
    """The codecs that no other one beats in both size and divergence, largest first."""
    best: list[CodecRow] = []
    measured = [r for r in rows if r.kl_nats_mean is not None and r.raw_bytes]
    for row in sorted(
        measured, key=lambda r: (r.kl_nats_mean or 0.0, r.stored_bytes / r.raw_bytes)
    ):
        if (
            not best
            or row.stored_bytes / row.raw_bytes < best[-1].stored_bytes / best[-1].raw_bytes
        ):
            best.append(row)
    return best


def _codecs(axes: Any, rows: Sequence[CodecRow]) -> None:
    some = [r.kl_nats_mean for r in rows if r.kl_nats_mean]
    floor = min(some, default=1e-6) / 5  # where "exactly none" is drawn on a logarithmic axis
    line = [((size_ratio(r) or 0) * 100, max(r.kl_nats_mean or 0, floor)) for r in frontier(rows)]
    if line:
        axes.plot(*zip(*line, strict=True), color="0.75", zorder=1, label="frontier")
    for row in rows:
        size = size_ratio(row)
        if size is None or row.kl_nats_mean is None:
            continue
        place = (size * 100, max(row.kl_nats_mean, floor))
        axes.scatter(*place, marker="o" if row.kl_nats_mean else "v", color="C0", zorder=2)
        axes.annotate(row.codec, place, textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.set_yscale("log")
    axes.set_xlabel("size, % of the raw KV")
    axes.set_ylabel("KL of the next token, mean (nats); a triangle is exactly 0")
    axes.grid(visible=True, alpha=0.3)
    axes.set_title("Codecs: size and what it costs")


def _blend(axes: Any, rows: Sequence[BlendRow]) -> None:
    """KL over the share of tokens that was computed, from naive concatenation to all of them."""
    curve = [row for row in rows if row.way not in (FULL, PREFIX_ONLY)]
    places = [row.computed_ratio * 100 for row in curve]
    for label, kl in (
        ("over the question", [row.kl_nats_mean for row in curve]),
        ("where the answer begins", [row.kl_nats_answer for row in curve]),
    ):
        axes.plot(places, kl, marker="o", label=label)
    for row, place in zip(curve, places, strict=True):
        axes.annotate(
            row.way,
            (place, row.kl_nats_mean),
            textcoords="offset points",
            xytext=(4, 6),
            fontsize=8,
        )
    axes.set_xlabel("tokens computed, % of the prompt")
    axes.set_ylabel("KL to a full prefill (nats)")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    axes.set_title("Blend: by the share computed again")
