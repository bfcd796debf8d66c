"""Learns how vLLM's CPU attention packs K and V into a page.

The backend's bytes are opaque: K and V are permuted by instruction set, dtype, page and head size.
So we ask it: element i of a page is given the digits of i, one digit a pass, through the backend's
own write operation, and the page is read back raw. Digits are small integers that the KV dtype
holds exactly. The learned map is then proven on random values, bit for bit, before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvist.connectors.pages import RegionMap
from kvist.core.errors import LayoutError

_EXACT_BASE = {  # digits 0..base-1 are exact in this dtype
    torch.float32: 4096,
    torch.float16: 1024,
    torch.bfloat16: 128,
}
_PAGES = 2  # page 1 is written; page 0 must stay untouched


@dataclass(frozen=True, slots=True)
class PageShape:
    """One layer's page: `heads` KV heads of `head_dim`, `tokens` tokens."""

    heads: int
    tokens: int
    head_dim: int
    dtype: torch.dtype


class _Probe:
    """A tiny KV cache of the backend's own shape."""

    def __init__(self, shape: PageShape, isa: str) -> None:
        self.shape = shape
        self.isa = isa
        self.cache = torch.zeros(
            _PAGES, shape.heads, shape.tokens, 2 * shape.head_dim, dtype=shape.dtype
        )

    def write(self, key: torch.Tensor, value: torch.Tensor) -> NDArray[np.float64]:
        """Writes one page of K and V `[token, head, dim]`; returns the raw page as float64."""
        from vllm import _custom_ops as ops

        s = self.shape
        self.cache.zero_()
        halves = self.cache.view(_PAGES, s.heads, 2 * s.tokens, s.head_dim)
        key_cache, value_cache = halves.chunk(2, dim=2)
        slots = torch.arange(s.tokens, dtype=torch.int64) + s.tokens
        ops.cpu_attn_reshape_and_cache(
            key.contiguous(), value.contiguous(), key_cache, value_cache, slots, self.isa
        )
        raw: NDArray[np.float64] = self.cache[1].reshape(-1).to(torch.float64).numpy()
        return raw


def learn(shape: PageShape, isa: str) -> RegionMap:
    """The page map of vLLM's CPU attention for this shape and instruction set.

    Raises:
        LayoutError: the dtype is unknown, or what was learned fails its proof.
    """
    if shape.dtype not in _EXACT_BASE:
        raise LayoutError(f"KV dtype {shape.dtype} is not supported on vLLM's CPU backend")
    probe = _Probe(shape, isa)
    count = 2 * shape.heads * shape.tokens * shape.head_dim
    places = _places(probe, count, _EXACT_BASE[shape.dtype])
    region = _regions(places, shape)
    _prove(probe, places)
    return region


def _places(probe: _Probe, count: int, base: int) -> NDArray[np.int64]:
    """`places[kind, head, token, dim]` = element offset in the page."""
    s = probe.shape
    index = torch.arange(1, count + 1, dtype=torch.int64).view(2, s.heads, s.tokens, s.head_dim)
    found = np.zeros(count, dtype=np.int64)
    weight = 1
    while weight <= count:
        digit = ((index // weight) % base).to(s.dtype)
        raw = probe.write(digit[0].transpose(0, 1), digit[1].transpose(0, 1))
        found += raw.astype(np.int64) * weight
        weight *= base
    if sorted(found.tolist()) != list(range(1, count + 1)):
        raise LayoutError("vLLM's CPU attention does not store K and V as a permutation")
    places = np.empty(count, dtype=np.int64)
    places[found - 1] = np.arange(count, dtype=np.int64)
    return places.reshape(2, s.heads, s.tokens, s.head_dim)


def _regions(places: NDArray[np.int64], shape: PageShape) -> RegionMap:
    """Splits places into (head start, offset within head); the pattern must repeat per head."""
    flat = places.reshape(2, shape.heads, -1)
    heads = flat.min(axis=2)
    offsets = flat - heads[:, :, None]
    if not (offsets == offsets[:, :1, :]).all():
        raise LayoutError("vLLM's CPU attention packs heads differently from one another")
    page = 2 * shape.heads * shape.tokens * shape.head_dim
    return RegionMap(np.ascontiguousarray(offsets[:, 0, :]), heads, page)


def _prove(probe: _Probe, places: NDArray[np.int64]) -> None:
    """Random values must come back bit for bit through the map."""
    s = probe.shape
    seed = torch.Generator().manual_seed(1)
    kv = torch.randn(2, s.heads, s.tokens, s.head_dim, generator=seed).to(s.dtype)
    raw = probe.write(kv[0].transpose(0, 1), kv[1].transpose(0, 1))
    if not np.array_equal(raw[places.reshape(-1)], kv.reshape(-1).to(torch.float64).numpy()):
        raise LayoutError("the learned page map does not reproduce random values")
