"""Prompts of random tokens: two of them share nothing, and a seed makes the same ones again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_LOWEST, _HIGHEST = 100, 40_000  # ordinary tokens of the demo model


def prompt(tokens: int, *label: object) -> list[int]:
    """`tokens` token ids; `label` names the prompt, equal labels give equal prompts."""
    rng = random.Random("/".join(map(str, label)))
    return [rng.randrange(_LOWEST, _HIGHEST) for _ in range(tokens)]


def alternating(names: Sequence[T], round_number: int) -> list[T]:
    """`names` in the order of a round: forwards, backwards, forwards … (ABBA).

    What drifts over a run then weighs on all alike.
    """
    return list(names) if round_number % 2 == 0 else list(reversed(names))
