"""A linear time model that learns from what it sees: bounded, robust recursive least squares.

Theory of operation. A pass takes `Σ seed_i · θ_i · x_i` seconds: the seed says what the data sheet
promises, θ (1 at first) what the machine does. Rows are divided by the time that the seed gives, so
that a relative error counts the same for a short and a long pass.

* *Warm-up.* Engines compile, page and capture graphs in their first passes. The first
  `WARM_UP` passes are only kept; from the third on, all of θ is the lower median of the ratios of
  seen to seeded time. After the last they are all fitted at once.
* *Learning.* Recursive least squares with a forgetting factor. A residual larger than `HUBER`
  running scales (a collection, another tenant) counts only as much as one of that size. After
  `CHANGED` such residuals in a row, all of one sign, it is the machine that has changed: θ is
  scaled to those passes and its uncertainty opened again.
* *Bounds.* θ stays in `[0, MAX_RATIO]`; a coefficient whose seed is 0 stays 0. A bound that is met
  moves the others along the covariance, as a constrained fit would, and the covariance is kept
  from growing where passes are all alike.

Plain Python floats and no clock: the same observations give the same bits on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvist.core.errors import ConfigError

WARM_UP = 5
MIN_RATIO, MAX_RATIO = 0.01, 200.0
HUBER = 2.5
CHANGED = 5
_FORGETTING = 0.98
_SCALE_STEP = 0.1
_SCALE_FLOOR = 0.02
_PRIOR = 9.0  # variance of θ relative to itself after warm-up
_MAX_VARIANCE = 30.0


class LinearTimes:
    """Seconds as a non-negative linear function of a few features, seeded and then learned.

    Not thread-safe: one owner observes and predicts.
    """

    __slots__ = (
        "_covariance",
        "_found",
        "_kept",
        "_scale",
        "_seed",
        "_theta",
        "ignored",
        "observed",
    )

    def __init__(self, seed: Sequence[float]) -> None:
        """`seed[i]` is seconds per unit of feature i.

        Raises:
            ConfigError: a coefficient that is negative or not finite, or none above 0.
        """
        if any(not (0 <= s < math.inf) for s in seed) or not any(seed):
            raise ConfigError(f"a time model cannot start from {list(seed)}")
        self._seed = tuple(float(s) for s in seed)
        self._theta = [1.0] * len(seed)
        self._found: tuple[float, ...] | None = None  # by θ as it is
        self._covariance = _diagonal(len(seed), _PRIOR)
        self._scale = 0.0
        self._kept: list[tuple[list[float], float]] = []  # warm-up, then a row of outliers
        self.observed = 0
        self.ignored = 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per unit of each feature, as believed now; the same object until that changes."""
        found = self._found
        if found is None:
            found = tuple(s * t for s, t in zip(self._seed, self._theta, strict=True))
            self._found = found
        return found

    def predict_s(self, features: Sequence[float]) -> float:
        """Predicted seconds of a pass with these features (all ≥ 0)."""
        return sum(c * x for c, x in zip(self.coefficients, features, strict=True))

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Learns from a pass that took `seconds`; a pass of no work or of no time is ignored.

        Raises:
            ValueError: a negative or non-finite time or feature.
        """
        if not all(0 <= v < math.inf for v in (*features, seconds)):
            raise ValueError(f"a pass of {seconds} s with features {list(features)}")
        seeded_s = sum(s * x for s, x in zip(self._seed, features, strict=True))
        if seeded_s <= 0 or seconds <= 0:
            self.ignored += 1
            return
        self.observed += 1
        self._found = None
        row = [s * x / seeded_s for s, x in zip(self._seed, features, strict=True)]
        ratio = seconds / seeded_s
        if self.observed > WARM_UP:
            self._learn(row, ratio)
            return
        self._kept.append((row, ratio))
        if self.observed > 2:
            start = min(MAX_RATIO, max(MIN_RATIO, _lower_median([r for _, r in self._kept])))
            self._theta = [start] * len(self._seed)
        if self.observed == WARM_UP:
            self._restart()

    def _expected(self, row: list[float]) -> float:
        return sum(t * x for t, x in zip(self._theta, row, strict=True))

    def _restart(self) -> None:
        """Opens the uncertainty of θ and fits what is kept."""
        kept, self._kept = self._kept, []
        level = max(MIN_RATIO, sum(self._theta) / len(self._theta))
        spread = sorted(abs(r - self._expected(row)) for row, r in kept)
        # The larger half of the deviations may be compilation.
        self._scale = max(_SCALE_FLOOR * level, spread[len(spread) // 2])
        self._covariance = _diagonal(len(self._seed), _PRIOR * level * level)
        for row, ratio in kept:
            self._update(row, ratio)

    def _learn(self, row: list[float], ratio: float) -> None:
        residual = ratio - self._expected(row)
        others = [r - self._expected(x) for x, r in self._kept[-1:]]
        if abs(residual) <= HUBER * self._scale or any(o * residual < 0 for o in others):
            self._kept.clear()
        if abs(residual) > HUBER * self._scale:
            self._kept.append((row, ratio))
        if len(self._kept) < CHANGED:
            self._update(row, ratio)
            return
        factor = _lower_median([r / max(self._expected(x), 1e-9) for x, r in self._kept])
        self._theta = [min(MAX_RATIO, t * factor) for t in self._theta]
        self._keep_in_bounds()
        self._restart()

    def _update(self, row: list[float], ratio: float) -> None:
        expected = self._expected(row)
        residual = ratio - expected
        limit = HUBER * self._scale
        weight = 1.0 if abs(residual) <= limit else limit / abs(residual)
        # What is far off widens the scale by a bounded step: one pass is damped, many are believed.
        seen = min(abs(residual), 2 * limit)
        floor = _SCALE_FLOOR * max(expected, MIN_RATIO)
        self._scale = max(floor, (1 - _SCALE_STEP) * self._scale + _SCALE_STEP * seen)
        noise = max(ratio, expected) ** 2 * 0.01  # 10 % of a pass is taken for noise
        spread = [sum(p * x for p, x in zip(line, row, strict=True)) for line in self._covariance]
        total = noise * _FORGETTING / weight + sum(x * s for x, s in zip(row, spread, strict=True))
        gain = [s / total for s in spread]
        self._theta = [t + g * residual for t, g in zip(self._theta, gain, strict=True)]
        self._covariance = [
            [(p - g * s) / _FORGETTING for p, s in zip(line, spread, strict=True)]
            for line, g in zip(self._covariance, gain, strict=True)
        ]
        self._keep_in_bounds()

    def _keep_in_bounds(self) -> None:
        size = len(self._theta)
        for i in range(size):
            bounded = min(MAX_RATIO, max(0.0, self._theta[i]))
            excess, own = self._theta[i] - bounded, self._covariance[i][i]
            if excess and own > 0:
                for j in range(size):
                    if j != i:
                        self._theta[j] -= self._covariance[j][i] / own * excess
                self._theta[i] = bounded
        self._theta = [min(MAX_RATIO, max(0.0, t)) for t in self._theta]
        if sum(self._theta) < MIN_RATIO:
            self._theta = [MIN_RATIO] * size
        level = max(sum(self._theta) / size, MIN_RATIO)
        most = max(self._covariance[i][i] for i in range(size))
        limit = _MAX_VARIANCE * level * level
        if most > limit:
            self._covariance = [[p * limit / most for p in line] for line in self._covariance]


def _lower_median(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def _diagonal(size: int, value: float) -> list[list[float]]:
    return [[value if i == j else 0.0 for j in range(size)] for i in range(size)]
