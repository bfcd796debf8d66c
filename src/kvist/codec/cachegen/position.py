"""Where in its sequence a block stands: found from its keys, since the codec is not told.

RoPE turns the mean of a pair of channels by the position. A block's keys, turned back as if it
stood at the start, have means that are still turned by its first position: the position under which
they fit the table's means best is the answer. Blocks begin at whole multiples of their length. A
wrong answer costs bytes and no precision: the position is written into the payload.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvist.codec.cachegen.table import ProfileTable
from kvist.native.cachegen_twin import to_float

MAX_POSITION = 1 << 20
_CANDIDATES = 8192
_PAIRS = 256
_MEMORY = 1 << 21  # pairs × candidates held at once

Angles = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]


class Turning:
    """Angles of a table's keys, and the search for a block's position. Thread-safe."""

    def __init__(self, table: ProfileTable, block_tokens: int, dtype: str) -> None:
        self._inv_freq = table.inv_freq
        self._tokens, self._dtype = block_tokens, dtype
        self._dim = table.shape.head_dim
        pairs = len(table.inv_freq)
        self.pairs = pairs
        self.angles = lru_cache(maxsize=64)(self._angles)
        if not pairs:
            return
        keys = np.arange(table.shape.regions) // table.shape.kv_heads % table.shape.kinds == 0
        mean = table.mean[keys]
        middle = mean[:, :pairs] + 1j * mean[:, pairs : 2 * pairs]
        # What a mean stands out by: in units of its channels' weighted spread.
        strength = np.abs(middle) * table.weight[keys][:, :pairs]
        best = np.argsort(-strength, axis=None, kind="stable")[:_PAIRS]
        region, self._pair = np.unravel_index(best, strength.shape)
        self._region = np.flatnonzero(keys)[region]
        self._middle = middle[region, self._pair]
        weight = table.weight[keys][region, self._pair]
        self._middle = self._middle * weight**2 / (1 + (strength.ravel()[best]) ** 2)
        count = min(_CANDIDATES, _MEMORY // len(best), MAX_POSITION // block_tokens)
        self._starts = np.arange(count) * block_tokens
        self._phasors: npt.NDArray[np.complex64] | None = None

    def find(self, block: memoryview) -> int:
        """The position of the first token of `block`, as far as its keys show; 0 without RoPE."""
        if not self.pairs:
            return 0
        x = to_float(block, self._dtype).reshape(-1, self._tokens, self._dim)
        a, b = x[self._region, :, self._pair], x[self._region, :, self._pair + self.pairs]
        theta = self._inv_freq[self._pair]
        back = np.exp(-1j * theta[:, None] * np.arange(self._tokens))
        with np.errstate(all="ignore"):
            # One token unlike all others must not outweigh them.
            length = np.hypot(a, b)
            most = 2 * np.median(length, axis=1, keepdims=True)
            level = np.minimum(1, np.nan_to_num(most / length, nan=0, posinf=1))
            found = np.nan_to_num(((a + 1j * b) * back * level).mean(1), posinf=0, neginf=0)
            if self._phasors is None:
                self._phasors = np.exp(1j * self._starts[:, None] * theta).astype(np.complex64)
            score = (self._phasors @ (self._middle * np.conj(found)).astype(np.complex64)).real
        return int(self._starts[np.nan_to_num(score, nan=-np.inf).argmax()])

    def _angles(self, position: int) -> Angles:
        """Cosines and sines `[tokens, pairs]` of a block that begins at `position`."""
        angle = (position + np.arange(self._tokens))[:, None] * self._inv_freq
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
