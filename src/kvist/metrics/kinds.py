"""What a metric is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """How a metric's value moves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's name as Prometheus shows it, its unit, meaning and label names."""

    name: str
    kind: Kind
    unit: str
    description: str
    labels: tuple[str, ...] = ()
