"""How likely a block of some class is used again at some age, learned online, and what it is worth.

For each class: the ages at which a next use came, and, by the time it began, how many blocks still
wait for theirs (a block that waits since a minute says nothing of later ages). From both come the
hazard at each age, and from that the Gittins index

    value(a) = max over b ≥ a of (uses expected from a to b) / (time held from a to b)

in uses per block-second: what a block of age a brings if it is kept until the best moment to give
up. Ages lie in buckets that grow by a quarter. A class with little evidence leans on the curve of
all classes, and old evidence fades.

Source: Kaplan and Meier 1958 for the hazard; Gittins 1979, Aalto et al. 2009 for the index.
"""

from __future__ import annotations

import math
import operator

import numpy as np
import numpy.typing as npt

AGES = 64
_FIRST_AGE_S = 0.5  # what comes sooner does not matter: a request itself takes as long
_GROWTH = 1.26
_SCALE = 1.0 / math.log(_GROWTH)
_PRIOR_USES = 20.0
_MOST_PERIODS = 256

_Array = npt.NDArray[np.float64]
_edges = _FIRST_AGE_S * _GROWTH ** np.arange(AGES)
_widths_s: _Array = np.diff(np.concatenate([[0.0], _edges]))
_later = np.triu(np.ones((AGES, AGES), dtype=np.bool_))


def age_bucket(age_s: float) -> int:
    """Which of the `AGES` buckets an age falls into."""
    if age_s < _FIRST_AGE_S:
        return 0
    return min(AGES - 1, 1 + int(math.log(age_s / _FIRST_AGE_S) * _SCALE))


class HazardTable:
    """Counts by class and age, and the values that follow from them at the last `refresh`.

    The owner adds to the lists itself, as it does so for every use of a block.
    """

    def __init__(self, classes: int, now_s: float) -> None:
        self.ended = [[0.0] * AGES for _ in range(classes)]  # next uses, by class and age
        self.waiting: _Periods = {0: [0.0] * classes}  # without a next use, by period and class
        self.period = 0  # of uses that happen now
        self.values = [[0.0] * AGES for _ in range(classes)]  # uses per block-second
        self._known: set[int] = set()  # classes that were ever used
        self._began_s = {0: now_s}  # by period

    def fade(self, factor: float) -> None:
        """Makes the uses seen so far count less."""
        for ages in self.ended:
            ages[:] = [n * factor for n in ages]

    def refresh(self, now_s: float) -> None:
        """Computes the values anew and begins a period; the oldest beyond the limit is dropped."""
        self._known.update(c for c, n in enumerate(self.waiting[self.period]) if n)
        if known := sorted(self._known):
            of_known = operator.itemgetter(*known, known[0])  # a tuple also of one
            ended = np.array(of_known(self.ended)[:-1])
            counts = np.array([of_known(counts)[:-1] for counts in self.waiting.values()])
            waiting = np.zeros((AGES, len(known)))
            buckets = [age_bucket(now_s - self._began_s[period]) for period in self.waiting]
            np.add.at(waiting, buckets, counts)
            values = _gittins(*_hazards(ended, waiting.T))
            for cls, values_of_class in zip(known, values, strict=True):
                self.values[cls] = values_of_class.tolist()
        self.period += 1
        self.waiting[self.period] = [0.0] * len(self.ended)
        self._began_s[self.period] = now_s
        if len(self.waiting) > _MOST_PERIODS:
            oldest = next(iter(self.waiting))
            del self.waiting[oldest], self._began_s[oldest]


_Periods = dict[int, list[float]]


def _hazards(ended: _Array, waiting: _Array) -> tuple[_Array, _Array]:
    """Expected uses and time held in each bucket, of a block from age 0; all (classes, AGES)."""
    left = ended + waiting
    at_risk = np.cumsum(left[:, ::-1], axis=1)[:, ::-1] - left / 2
    pooled_at_risk = at_risk.sum(axis=0)
    pooled = ended.sum(axis=0) / np.maximum(pooled_at_risk, 1e-9)
    # The prior thins out with age like the evidence of all classes together.
    prior = _PRIOR_USES * pooled_at_risk / max(float(pooled_at_risk[0]), 1e-9)
    hazard = (ended + prior * pooled) / np.maximum(at_risk + prior, 1e-9)
    hazard = np.minimum(hazard, 1.0)
    survives = np.cumprod(1.0 - hazard, axis=1)
    reaches = np.concatenate([np.ones((len(ended), 1)), survives[:, :-1]], axis=1)
    uses = reaches * hazard
    return uses, (reaches - uses / 2) * _widths_s


def _gittins(uses: _Array, held_s: _Array) -> _Array:
    """Values of shape (classes, AGES); rows of the quotient: age now, columns: when to give up."""
    gained, held = np.cumsum(uses, axis=1), np.cumsum(held_s, axis=1)
    rise = gained[:, None, :] - (gained - uses)[:, :, None]
    run = held[:, None, :] - (held - held_s)[:, :, None]
    ratio = np.where(_later, rise / np.where(_later, np.maximum(run, 1e-12), 1.0), 0.0)
    values: _Array = ratio.max(axis=2)
    return values
