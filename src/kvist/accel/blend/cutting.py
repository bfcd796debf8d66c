"""Where a sequence of tokens is cut: at the same tokens of a passage, wherever it stands.

A rolling hash runs over `window_tokens` tokens. A position is marked if its hash is the least of
any `apart_tokens` neighbouring ones, so a mark depends on nothing but the tokens around it, and no
separator is needed. From that follows what a cut after a fixed number of tokens, or one that
depends on the cut before it, cannot promise:

* two marks are at most `apart_tokens` apart, on average half of that (`(apart_tokens + 1) / 2`);
* two sequences that have a run of `window_tokens + apart_tokens - 1` tokens in common have a mark
  in common in it (`Cutter.certain_tokens`). No luck is involved.

Where a text repeats itself within a window (a row of equal tokens), all equal hashes are marked.

Source: Schleimer et al., "Winnowing", SIGMOD 2003, section 3. We mark every position that ties,
which is what makes the mark a matter of the text alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]

WINDOW_TOKENS = 16
APART_TOKENS = 33

_NO_TOKENS = "tokens are a flat sequence of integers"
# Odd constants of splitmix64 and of a multiplicative hash.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_BASE = 0xD6E8FEB86659FD93
_WORD = 1 << 64


@dataclass(frozen=True, slots=True)
class Marks:
    """The marked positions of one sequence, and a fingerprint for each.

    Attributes:
        ends: `[marks]`, ascending: the last token of each marked window.
        fingerprints: `[marks]`: the hash of those `window_tokens` tokens.
    """

    ends: npt.NDArray[np.int64]
    fingerprints: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.ends)


@dataclass(frozen=True, slots=True)
class Cutter:
    """Marks positions of a sequence by their content.

    Attributes:
        window_tokens: tokens in a fingerprint: the shortest run that can be found.
        apart_tokens: most tokens from one mark to the next.
    """

    window_tokens: int = WINDOW_TOKENS
    apart_tokens: int = APART_TOKENS

    def __post_init__(self) -> None:
        if self.window_tokens < 1 or self.apart_tokens < 1:
            raise ValueError("a window and the distance of two marks are at least 1 token")

    @property
    def certain_tokens(self) -> int:
        """Every run of so many tokens that two sequences have in common is found."""
        return self.window_tokens + self.apart_tokens - 1

    @property
    def context_tokens(self) -> int:
        """How many tokens before a position decide, with those behind it, which are marked."""
        return self.window_tokens + self.apart_tokens - 2

    def __call__(self, tokens: Tokens, seed: int) -> Marks:
        """Marks `tokens`.

        A sequence too short for a whole neighbourhood gets the least of what it has; one shorter
        than a window has no mark.

        Args:
            tokens: `[tokens]`.
            seed: 64 bits; sequences that are marked with another seed have nothing in common.
        """
        hashes = _window_hashes(tokens, self.window_tokens, seed)
        if not len(hashes):
            return Marks(np.empty(0, np.int64), np.empty(0, np.uint64))
        apart = min(self.apart_tokens, len(hashes))
        least = _sliding(np.minimum, hashes, apart)
        # The greatest of the least values of all neighbourhoods that a position belongs to.
        padded = np.zeros(len(hashes) + apart - 1, np.uint64)
        padded[apart - 1 : apart - 1 + len(least)] = least
        marked = np.flatnonzero(_sliding(np.maximum, padded, apart) == hashes)
        return Marks(marked.astype(np.int64) + (self.window_tokens - 1), hashes[marked])


def as_tokens(tokens: Iterable[int] | npt.NDArray[Any]) -> Tokens:
    """`tokens` as a contiguous array of u32.

    Raises:
        OverflowError: a token is negative or above 2**32 - 1.
        ValueError: it is no flat sequence of integers.
    """
    if not isinstance(tokens, np.ndarray):
        return _from_sequence(tokens)
    if not tokens.size:
        return np.empty(0, np.uint32)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(_NO_TOKENS)
    if tokens.dtype != np.uint32:
        if int(tokens.min()) < 0 or int(tokens.max()) >= 1 << 32:
            raise OverflowError("a token is negative or above 2**32 - 1")
        tokens = tokens.astype(np.uint32)
    return np.ascontiguousarray(tokens)


def _from_sequence(tokens: Iterable[int]) -> Tokens:
    """Nine times as fast as numpy's own way from a list."""
    if isinstance(tokens, str | bytes | bytearray | memoryview):
        raise ValueError(_NO_TOKENS)  # their bytes would be taken for tokens
    try:
        return np.frombuffer(array("I", tokens), np.uint32)
    except TypeError as error:
        raise ValueError(_NO_TOKENS) from error


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser, in place: every bit of the input moves every bit of the output."""
    values ^= values >> np.uint64(30)
    values *= _MIX_1
    values ^= values >> np.uint64(27)
    values *= _MIX_2
    values ^= values >> np.uint64(31)
    return values


def _window_hashes(tokens: Tokens, window: int, seed: int) -> npt.NDArray[np.uint64]:
    """Hash of each run of `window` tokens, `[tokens - window + 1]`.

    The polynomial over mixed tokens is put together from those of halves, so that a window of
    w tokens costs log2(w) passes. Its bits are mixed once more: an order needs good high bits.
    """
    if len(tokens) < window:
        return np.empty(0, np.uint64)
    power = tokens.astype(np.uint64)
    power *= _GOLDEN
    power += np.uint64(seed % _WORD)
    _mixed(power)
    # `power` covers 2**bit tokens from each position on, `found` the lowest bits of `window`.
    found: npt.NDArray[np.uint64] | None = None
    covered, span, rest = 0, 1, window
    while rest:
        if rest & 1:
            if found is None:
                found = power.copy()
            else:
                tail = power[covered : covered + len(found)]
                found = found[: len(tail)] * np.uint64(pow(_BASE, span, _WORD)) + tail
            covered += span
        rest >>= 1
        if rest:
            power = power[:-span] * np.uint64(pow(_BASE, span, _WORD)) + power[span:]
            span *= 2
    assert found is not None
    return _mixed(found[: len(tokens) - window + 1].copy())


def _sliding(ufunc: np.ufunc, values: npt.NDArray[np.uint64], width: int) -> npt.NDArray[np.uint64]:
    """Least or greatest of each `width` neighbours, `[values - width + 1]`, in log2 passes."""
    span = 1
    while span * 2 <= width:
        values = ufunc(values[:-span], values[span:])
        span *= 2
    if span < width:
        values = ufunc(values[: len(values) - (width - span)], values[width - span :])
    return values
