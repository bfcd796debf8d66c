"""How likely a block of some class is used again at some age, learned online, and what it is worth.

For each class: the ages at which a next use came, and, by the time it began, how many blocks still
wait for theirs (a block that waits since a minute says nothing of later ages). From both come the
hazard at each age, and from that the Gittins index

    value(a) = max over b ≥ a of (uses expected from a to b) / (time held from a to b)

in uses per block-second: what a block of age a brings if it is kept until the best moment to give
up. Ages lie in buckets that grow by a quarter. A class with little evidence leans on the curve of
all classes, and old evidence fades. Cohorts of waiting blocks whose ages share a bucket are merged
when there are many of them.

Source: Kaplan and Meier 1958 for the hazard; Gittins 1979, Aalto et al. 2009 for the index.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

AGES = 64
FIRST_AGE_S = 0.5  # what comes sooner does not matter: a request itself takes as long
_GROWTH = 1.26
AGE_SCALE = 1.0 / math.log(_GROWTH)
_PRIOR_USES = 20.0
_MOST_COHORTS = 96
_FEWEST_USES = 0.01  # expected of a new block in all its life
_ENOUGH_BLOCKS = 4000.0  # new ones seen before that is believed
NOT_WORTH_WRITING = -1.0  # the value of a new block then

_Array = npt.NDArray[np.float64]
_edges = FIRST_AGE_S * _GROWTH ** np.arange(AGES)
_widths_s: _Array = np.diff(np.concatenate([[0.0], _edges]))
# Added to a time held, it rules out giving up before now.
_never: _Array = np.where(np.triu(np.ones((AGES, AGES), dtype=np.bool_)), 0.0, np.inf)


def age_bucket(age_s: float) -> int:
    """Which of the `AGES` buckets an age falls into."""
    if age_s < FIRST_AGE_S:
        return 0
    bucket = 1 + int(math.log(age_s / FIRST_AGE_S) * AGE_SCALE)
    return bucket if bucket < AGES else AGES - 1


#: Where each bucket ends, a little late: by then `age_bucket` surely gives the next one.
BUCKET_ENDS_S: tuple[float, ...] = (*(float(e) * (1 + 1e-12) for e in _edges[:-1]), math.inf)


class Cohort:
    """Blocks used in the same stretch of time that wait for a next use, counted by class."""

    __slots__ = ("began_s", "into", "waiting")

    def __init__(self, began_s: float, classes: int) -> None:
        self.began_s = began_s
        self.into: Cohort | None = None  # the one it was merged into
        self.waiting = [0.0] * classes

    def root(self) -> Cohort:
        """The cohort that counts for this one: itself, or the one it was merged into at last."""
        cohort = self
        while cohort.into is not None:
            cohort = cohort.into
        return cohort


class HazardTable:
    """Counts by class and age, and the values that follow from them at the last `refresh`.

    The owner adds to the lists itself, as it does so for every use of a block.
    """

    def __init__(self, classes: int, now_s: float, fresh: Collection[int] = ()) -> None:
        """An empty table.

        Args:
            classes: how many there are.
            now_s: no block was used before.
            fresh: the classes of blocks that were never used before, which may be not worth a
                write.
        """
        self._fresh = frozenset(fresh)
        self.ended = [[0.0] * AGES for _ in range(classes)]  # next uses, by class and age
        self.values = [[0.0] * AGES for _ in range(classes)]  # uses per block-second
        self.cohort = Cohort(now_s, classes)  # of uses that happen now
        self._cohorts = [self.cohort]  # those that were not merged, the oldest first
        self._known: set[int] = set()  # classes that were ever used
        self._began_s = now_s

    def ended_wait(self, cohort: Cohort, cls: int, age_s: float, blocks: int) -> None:
        """Counts `blocks` of `cls`, used last in `cohort`, that are used again at `age_s`."""
        self.ended[cls][age_bucket(age_s)] += blocks
        cohort.root().waiting[cls] -= blocks

    def fade(self, factor: float) -> None:
        """Makes the uses seen so far count less."""
        for cls in self._known:
            self.ended[cls][:] = [n * factor for n in self.ended[cls]]

    def refresh(self, now_s: float) -> None:
        """Computes the values anew and begins a cohort."""
        self._known.update(c for c, n in enumerate(self.cohort.waiting) if n)
        buckets = [age_bucket(now_s - cohort.began_s) for cohort in self._cohorts]
        if known := sorted(self._known):
            ages = 1 + age_bucket(now_s - self._began_s)  # nothing is older
            of_known = operator.itemgetter(*known, known[0])  # a tuple also of one
            ended = np.array([row[:ages] for row in of_known(self.ended)[:-1]])
            counts = np.array([of_known(cohort.waiting)[:-1] for cohort in self._cohorts])
            waiting = np.zeros((ages, len(known)))
            np.add.at(waiting, buckets, counts)
            fresh = np.array([cls in self._fresh for cls in known])
            values = revised_values(ended, waiting.T, fresh)
            for cls, values_of_class in zip(known, values.tolist(), strict=True):
                self.values[cls][:ages] = values_of_class
        if len(self._cohorts) >= _MOST_COHORTS:
            self._merge(buckets)
        self.cohort = Cohort(now_s, len(self.ended))
        self._cohorts.append(self.cohort)

    def _merge(self, buckets: list[int]) -> None:
        """Merges cohorts whose ages share a bucket, the oldest first, until half are left."""
        kept: list[Cohort] = []
        spare = len(self._cohorts) - _MOST_COHORTS // 2
        last = -1
        for cohort, bucket in zip(self._cohorts, buckets, strict=True):
            if bucket != last or spare <= 0:
                kept.append(cohort)
                last = bucket
                continue
            spare -= 1
            into = cohort.into = kept[-1]
            ours, theirs = sum(into.waiting), sum(cohort.waiting)
            share = theirs / (ours + theirs) if ours + theirs else 0.5
            into.began_s += share * (cohort.began_s - into.began_s)
            into.waiting = list(map(operator.add, into.waiting, cohort.waiting))
            cohort.waiting = []
        self._cohorts = kept


def revised_values(ended: _Array, waiting: _Array, fresh: npt.NDArray[np.bool_]) -> _Array:
    """The values that follow from the counts; all of shape (classes, ages).

    Args:
        ended: next uses.
        waiting: blocks that wait for theirs.
        fresh: which classes are of blocks that were never used before.
    """
    uses, held_s = _hazards(ended, waiting)
    values = _gittins(uses, held_s)
    blocks = (ended.sum(axis=1) + waiting.sum(axis=1)) * fresh
    expected = float(blocks @ uses.sum(axis=1))
    if blocks.sum() > _ENOUGH_BLOCKS and expected < _FEWEST_USES * blocks.sum():
        values[fresh, 0] = NOT_WORTH_WRITING
    return values


def _hazards(ended: _Array, waiting: _Array) -> tuple[_Array, _Array]:
    """Expected uses and time held in each bucket, of a block from age 0; all (classes, ages)."""
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
    return uses, (reaches - uses / 2) * _widths_s[: ended.shape[1]]


def _gittins(uses: _Array, held_s: _Array) -> _Array:
    """Values of shape (classes, ages); rows of the quotient: age now, columns: when to give up."""
    ages = uses.shape[1]
    gained, held = np.cumsum(uses, axis=1), np.cumsum(held_s, axis=1)
    ratio = gained[:, None, :] - (gained - uses)[:, :, None]
    run = held[:, None, :] - (held - held_s)[:, :, None]
    np.maximum(run, 1e-12, out=run)
    run += _never[:ages, :ages]
    ratio /= run
    values: _Array = ratio.max(axis=2)
    return values
