"""What a use of a block saves, rounded to a few steps, so that leaves of one weight can be ranked.

Later blocks of a prompt cost more to recompute: they attend to everything before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvist.core.keys import Key

Weigh = Callable[[Key], float]

_STEPS = 4  # in a doubling
_MOST = 40 * _STEPS


def weight_bucket(weight: float) -> int:
    """The step of a weight, such as seconds per byte in any unit; 0 stands for 1."""
    if weight <= 0:
        return -_MOST
    return max(-_MOST, min(_MOST, round(math.log2(weight) * _STEPS)))


def weight_of(bucket: int) -> float:
    """The weight for which a step stands."""
    return float(2.0 ** (bucket / _STEPS))
