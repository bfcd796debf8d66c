"""Every metric that Kvist exports, named once; `docs/metrics.md` is generated from here."""

from __future__ import annotations

from kvist.metrics.blocks import BLOCKS
from kvist.metrics.front import FRONT
from kvist.metrics.kinds import Kind, Metric

METRICS: tuple[Metric, ...] = BLOCKS + FRONT
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}

__all__ = ["BY_NAME", "METRICS", "Kind", "Metric"]
