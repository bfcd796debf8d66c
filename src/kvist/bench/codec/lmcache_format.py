"""What LMCache's own CacheGen serialiser makes of KV: its values and its size, for comparison only.

Written from its description: K and V apart, each as `[layer, token, channel]`. A token's vector
is divided by its largest magnitude and rounded to `bins` steps: 32 for K of layers 0-9 and V of
layers 0-1, else 16. Over a chunk of tokens each (layer, channel) has a distribution of its own, as
16-bit cumulative counts, and its symbols are range-coded with it. Distributions, largest magnitudes
and lengths are stored beside the streams. There are no anchors and no deltas.

The coder's size is computed from the very integers that it would code with (the sum of -log2 of
each symbol's share, rounded up to bytes for each stream) rather than by running it; what pickle
adds to the container is left out. Both favour it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CHUNK_TOKENS = 256
_FINE_BINS, _COARSE_BINS = 32, 16
_FINE_LAYERS = (10, 2)  # of K and of V
_CDF_RANGE = 0xFFFF
_LENGTH_BYTES = 4
_SCALE_BYTES = 2

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Coded:
    """KV as it comes back, and its bytes in the format."""

    kv: Floats
    stored_bytes: int


def lmcache_cachegen(kv: Floats, *, chunk_tokens: int = CHUNK_TOKENS) -> Coded:
    """Codes `[layers, 2, heads, tokens, D]`."""
    out = np.empty_like(kv)
    size_bytes = 0
    for layer, kind in np.ndindex(*kv.shape[:2]):
        bins = _FINE_BINS if layer < _FINE_LAYERS[kind] else _COARSE_BINS
        for start in range(0, kv.shape[3], chunk_tokens):
            span = slice(start, start + chunk_tokens)
            part = kv[layer, kind, :, span]
            heads, tokens, dim = part.shape
            flat = part.transpose(1, 0, 2).reshape(tokens, heads * dim)
            symbols, scale = _quantise(flat, bins)
            middle = bins // 2 - 1
            back = (symbols - middle).astype(np.float32) / middle * scale
            out[layer, kind, :, span] = back.reshape(tokens, heads, dim).transpose(1, 0, 2)
            size_bytes += _coded_bytes(symbols, bins) + tokens * _SCALE_BYTES
    return Coded(out, size_bytes)


def _quantise(flat: Floats, bins: int) -> tuple[npt.NDArray[np.int64], Floats]:
    """Symbols `[tokens, channels]`, and each token's largest magnitude."""
    scale = np.abs(flat).max(1, keepdims=True)
    middle = bins // 2 - 1
    shares = flat * middle / np.where(scale > 0, scale, 1)
    return np.rint(shares + middle).astype(np.int64), scale


def _coded_bytes(symbols: npt.NDArray[np.int64], bins: int) -> int:
    """Of the streams of all channels, with their distributions and lengths."""
    tokens, channels = symbols.shape
    counts = np.zeros((channels, bins), np.int64)
    np.add.at(counts, (np.arange(channels)[None, :], symbols), 1)
    cumulative = np.concatenate([np.zeros((channels, 1), np.int64), counts.cumsum(1)], axis=1)
    cdf = (_CDF_RANGE - bins) * cumulative // tokens + np.arange(bins + 1)
    shares = np.diff(cdf, axis=1).astype(np.float64)
    shares[:, -1] += (1 << 16) - cdf[:, -1]  # the last symbol takes what is left
    bits = -(counts * np.log2(shares / (1 << 16))).sum(1)
    streams = np.ceil((bits + 2) / 8).astype(np.int64)
    total: int = sum(streams.tolist()) + channels * (2 * (bins + 1) + _LENGTH_BYTES)
    return total
