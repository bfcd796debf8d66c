"""Time of a decode step: `d0 + d1·B + d2·Σctx` for B sequences with Σctx tokens of context.

`d0` reads the weights, `d1` is a sequence's own work, `d2` reads a token's KV.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvist.cost.learner import LinearTimes


@dataclass(frozen=True, slots=True)
class DecodeCoefficients:
    """`d0_s` seconds a step, `d1_s` a sequence, `d2_s` a token of context; all ≥ 0."""

    d0_s: float
    d1_s: float
    d2_s: float

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """Seconds of a step of `batch` sequences with `context_tokens` in all; 0 for none."""
        if batch <= 0:
            return 0.0
        return self.d0_s + self.d1_s * batch + self.d2_s * context_tokens

    def scaled(self, factor: float) -> DecodeCoefficients:
        """All times multiplied by `factor`."""
        return DecodeCoefficients(self.d0_s * factor, self.d1_s * factor, self.d2_s * factor)


class DecodeTimes:
    """Decode times that start from a seed and learn from observed steps. One owner."""

    __slots__ = ("_coefficients", "_of", "_times", "seed")

    def __init__(self, seed: DecodeCoefficients) -> None:
        self.seed = seed
        self._times = LinearTimes((seed.d0_s, seed.d1_s, seed.d2_s))
        self._of = self._times.coefficients
        self._coefficients = DecodeCoefficients(*self._of)

    @property
    def coefficients(self) -> DecodeCoefficients:
        """What is believed now."""
        found = self._times.coefficients
        if found is not self._of:
            self._of, self._coefficients = found, DecodeCoefficients(*found)
        return self._coefficients

    @property
    def observed(self) -> int:
        return self._times.observed

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """Predicted seconds of one step."""
        return self.coefficients.decode_s(batch, context_tokens)

    def observe(self, batch: int, context_tokens: int, seconds: float) -> None:
        """Learns from a step; one of no sequences is ignored.

        Raises:
            ValueError: a negative or non-finite number.
        """
        step = 1.0 if batch else 0.0
        self._times.observe((step, float(batch), float(context_tokens) * step), seconds)
