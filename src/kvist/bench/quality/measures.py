"""How far two predictions of a model lie apart: logits in, nats and shares out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ROWS = 16  # rows in float64 at once: a vocabulary of 150,000 takes 20 MB of them

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one pass predicted beside a reference; one entry a position.

    `kl_nats` is KL(reference ‖ other), `surprise_nats` is -ln p(true next token) of the other,
    `same_top` whether both find the same token most probable. Where the other is not finite,
    `kl_nats` and `surprise_nats` are infinite and `same_top` is false.
    """

    kl_nats: Floats
    surprise_nats: Floats
    same_top: NDArray[np.bool_]


def compare(
    reference: NDArray[np.float32], other: NDArray[np.float32], targets: Sequence[int]
) -> Comparison:
    """Compares logits `[positions, vocabulary]` row by row, in float64.

    Args:
        targets: the token that truly follows each position.

    Raises:
        ValueError: the shapes or lengths differ.
    """
    if reference.shape != other.shape or reference.ndim != 2 or len(targets) != len(other):
        raise ValueError(
            f"logits of {reference.shape} and {other.shape} for {len(targets)} targets"
        )
    kl, surprise = np.empty(len(other)), np.empty(len(other))
    for start in range(0, len(other), _ROWS):
        rows = slice(start, start + _ROWS)
        expected, found = log_softmax(reference[rows]), log_softmax(other[rows])
        kl[rows] = np.sum(np.exp(expected) * _difference(expected, found), axis=1)
        surprise[rows] = -found[np.arange(len(found)), targets[start : start + _ROWS]]
    lost = ~np.isfinite(other).all(axis=1)
    kl[lost] = surprise[lost] = math.inf
    same = reference.argmax(axis=1) == other.argmax(axis=1)
    # Rounding leaves a nat of 1e-17 below zero where the two are all but equal.
    return Comparison(np.maximum(kl, 0.0), surprise, same & ~lost)


def log_softmax(logits: NDArray[np.float32]) -> Floats:
    """Logarithms of the probabilities `[positions, vocabulary]`, in float64."""
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinities: the caller marks such rows
        wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.sum(np.exp(wide), axis=1, keepdims=True))
    return wide


def _difference(expected: Floats, found: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        gap = expected - found
    gap[np.isneginf(expected)] = 0.0  # what never happens costs nothing, whatever was predicted
    return gap


def perplexity(surprise_nats: Floats) -> float:
    """exp of the mean surprise: the number of tokens the model hesitates between."""
    mean = float(np.mean(surprise_nats))
    return math.exp(mean) if mean < 700 else math.inf


def agreed_tokens(expected: Sequence[int], found: Sequence[int]) -> int:
    """Tokens that two answers have in common before they part."""
    for i, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return i
    return min(len(expected), len(found))
