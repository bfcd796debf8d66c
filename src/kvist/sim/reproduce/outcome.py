"""What an experiment says: figures beside the paper's, claims that hold or do not, remarks."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


class Unit(enum.Enum):
    """How a figure is written."""

    RATIO = "ratio"  # 1.43x
    SHARE = "share"  # 41 %
    GAIN = "gain"  # +157 %
    SECONDS = "seconds"
    RATE = "rate"  # 3.214 /s
    COUNT = "count"
    NUMBER = "number"  # 7.90


class Verdict(enum.Enum):
    """Whether a figure lies where it is held to lie."""

    WITHIN = "within"
    OUTSIDE = "OUTSIDE"
    NOT_HELD = "reported only"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.

    Attributes:
        what: is measured.
        unit: in which it is written.
        paper: None where the paper has none.
        ours: the mean, where several seeds were run.
        held: the accepted range.
        by_seed: what each seed gave, in order; empty where one was run.
    """

    what: str
    unit: Unit
    paper: float | None
    ours: float
    held: tuple[float, float] | None = None
    by_seed: tuple[float, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """Whether ours lies in `held`."""
        if self.held is None:
            return Verdict.NOT_HELD
        low, high = self.held
        return Verdict.WITHIN if low <= self.ours <= high else Verdict.OUTSIDE

    @property
    def over_paper(self) -> float | None:
        """Ours divided by the paper's."""
        return self.ours / self.paper if self.paper else None


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of the paper's that our run bears out, or does not."""

    text: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """One experiment.

    Attributes:
        name: as `--only` takes it.
        title: what was asked.
        source: the figure of the paper.
        setting: nodes, cache and arrivals of our run, in a sentence.
        figures: ours beside the paper's.
        claims: what the figures show, each true or not.
        disagreements: where the model is known to differ, and why.
    """

    name: str
    title: str
    source: str
    setting: str
    figures: tuple[Figure, ...]
    claims: tuple[Claim, ...] = ()
    disagreements: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether no figure is outside and every claim is borne out."""
        return all(f.verdict is not Verdict.OUTSIDE for f in self.figures) and all(
            claim.holds for claim in self.claims
        )


def over_seeds(what: str, unit: Unit, paper: float | None, values: Sequence[float]) -> Figure:
    """A figure that several seeds gave: their mean, and each.

    Raises:
        ValueError: there is none.
    """
    if not values:
        raise ValueError(f"no seed gave {what!r}")
    return Figure(
        what, unit, paper, statistics.fmean(values), by_seed=tuple(values) if values[1:] else ()
    )


def around(value: float, relative: float) -> tuple[float, float]:
    """The range of `value` up to a share of it."""
    return value * (1 - relative), value * (1 + relative)
