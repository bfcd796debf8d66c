"""Time of a prefill: `a + b·(n - p) + c·(n² - p²)` for a prompt of n tokens of which p are cached.

`a` is what any pass costs (weights are read, kernels launched), `b` the weights' work for a token,
`c` attention's work for a pair of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvist.cost.learner import LinearTimes


@dataclass(frozen=True, slots=True)
class PrefillCoefficients:
    """`a_s` seconds a pass, `b_s` a token, `c_s` a squared token; all ≥ 0."""

    a_s: float
    b_s: float
    c_s: float

    def prefill_s(self, new_tokens: int, cached_tokens: int) -> float:
        """Seconds to compute `new_tokens` after `cached_tokens`; 0 if there are none."""
        if new_tokens <= 0:
            return 0.0
        square = new_tokens * (new_tokens + 2 * cached_tokens)
        return self.a_s + self.b_s * new_tokens + self.c_s * square

    def scaled(self, factor: float) -> PrefillCoefficients:
        """All times multiplied by `factor`: one knob for an engine's efficiency."""
        return PrefillCoefficients(self.a_s * factor, self.b_s * factor, self.c_s * factor)


def pass_features(requests: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """Features of one pass over several requests, each (new tokens, cached tokens)."""
    linear = sum(new for new, _ in requests)
    square = sum(new * (new + 2 * cached) for new, cached in requests)
    return 1.0, float(linear), float(square)


class PrefillTimes:
    """Prefill times that start from a seed and learn from observed passes. One owner."""

    __slots__ = ("_coefficients", "_of", "_times", "seed")

    def __init__(self, seed: PrefillCoefficients) -> None:
        self.seed = seed
        self._times = LinearTimes((seed.a_s, seed.b_s, seed.c_s))
        self._of = self._times.coefficients
        self._coefficients = PrefillCoefficients(*self._of)

    @property
    def coefficients(self) -> PrefillCoefficients:
        """What is believed now."""
        found = self._times.coefficients
        if found is not self._of:
            self._of, self._coefficients = found, PrefillCoefficients(*found)
        return self._coefficients

    @property
    def observed(self) -> int:
        return self._times.observed

    def prefill_s(self, new_tokens: int, cached_tokens: int) -> float:
        """Predicted seconds to compute `new_tokens` after `cached_tokens`."""
        return self.coefficients.prefill_s(new_tokens, cached_tokens)

    def observe(self, new_tokens: int, cached_tokens: int, seconds: float) -> None:
        """Learns from a pass over one request.

        Raises:
            ValueError: a negative or non-finite number.
        """
        self.observe_pass([(new_tokens, cached_tokens)], seconds)

    def observe_pass(self, requests: Sequence[tuple[int, int]], seconds: float) -> None:
        """Learns from a pass over several requests, each (new tokens, cached tokens).

        A pass without new tokens is ignored.

        Raises:
            ValueError: a negative or non-finite number.
        """
        if any(new < 0 or cached < 0 for new, cached in requests):
            raise ValueError(f"negative tokens in a pass of {list(requests)}")
        features = pass_features(requests)
        self._times.observe(features if features[1] else (0.0, 0.0, 0.0), seconds)
