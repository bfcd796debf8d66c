"""KV that looks like a model's, and a `cachegen` table of it, without a model.

Channels have means and spreads of their own, directions within a head depend on each other, keys
are turned by their position as RoPE does, and the first token of a sequence is unlike all others.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvist.codec.cachegen.profile import Sample, Sensitivity, build_table
from kvist.codec.cachegen.table import ProfileTable, TableShape
from kvist.core.layout import BlockLayout
from kvist.native.cachegen_twin import from_float

_PROFILE_TOKENS = 256
_THETA = 1e4


def inverse_frequencies(head_dim: int) -> npt.NDArray[np.float64]:
    """RoPE's, for pairs (i, i + head_dim // 2); none if the size is odd."""
    if head_dim % 2:
        return np.zeros(0)
    return np.asarray(_THETA ** (-np.arange(0, head_dim, 2) / head_dim), np.float64)


def made_up_kv(
    shape: TableShape, tokens: int, *, seed: int = 0, position: int = 0
) -> npt.NDArray[np.float32]:
    """`[layers, kinds, heads, tokens, D]` from `position` of a sequence; the model is one and the
    same, `seed` chooses the text.
    """
    model = np.random.default_rng(20260)
    rows = (shape.layers, shape.kinds, shape.kv_heads)
    mean = model.standard_normal((*rows, 1, shape.head_dim)) * 3
    spread = np.exp2(model.standard_normal((*rows, 1, shape.head_dim)))
    mixing = model.standard_normal((*rows, shape.head_dim, shape.head_dim))
    text = np.random.default_rng(seed)
    drawn = text.laplace(size=(*rows, tokens, shape.head_dim))
    x = mean + spread * (drawn @ mixing) / np.sqrt(shape.head_dim)
    if position == 0:
        x[:, :, :, 0] += 40 * spread[:, :, :, 0]
    angle = (position + np.arange(tokens))[:, None] * inverse_frequencies(shape.head_dim)
    pairs = angle.shape[1]
    a, b = x[:, 0, :, :, :pairs].copy(), x[:, 0, :, :, pairs : 2 * pairs].copy()
    x[:, 0, :, :, :pairs] = a * np.cos(angle) - b * np.sin(angle)
    x[:, 0, :, :, pairs : 2 * pairs] = b * np.cos(angle) + a * np.sin(angle)
    return np.asarray(x, np.float32)


def made_up_block(layout: BlockLayout, *, seed: int = 1, position: int = 0) -> bytes:
    """A block of `made_up_kv` in a layout's dtype."""
    kv = made_up_kv(TableShape.of(layout), layout.block_tokens, seed=seed, position=position)
    return from_float(kv, layout.dtype).tobytes()


@lru_cache(maxsize=32)
def made_up_table(shape: TableShape) -> ProfileTable:
    """The table of `made_up_kv`, as a profile of it finds it."""
    kv = made_up_kv(shape, _PROFILE_TOKENS, seed=0)
    # How much errors matter, by channel; of the size that levels expect.
    matters = np.random.default_rng(7).exponential(
        size=(shape.layers, shape.kinds, shape.kv_heads, shape.head_dim)
    )
    return build_table(
        [Sample(kv)],
        Sensitivity(matters * 0.01 / shape.rows, answer_tokens=128),
        inv_freq=inverse_frequencies(shape.head_dim),
    )
