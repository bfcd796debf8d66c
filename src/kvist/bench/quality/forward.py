"""Forward passes over KV that is given: from canonical blocks to logits, in the model's own dtype.

The model runs in float32 and its KV is kept in bfloat16, as an engine keeps it: KV rounded to
bfloat16 is what every codec starts from, so that rounding counts as nobody's error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from kvist.bench.quality.measures import agreed_tokens
from kvist.connectors.model_settings import model_layout
from kvist.connectors.transformers.blocks import Staging, canonical_blocks
from kvist.core.layout import BlockLayout

KV_DTYPE = "bfloat16"


def kv_layout(model: Any, block_tokens: int) -> BlockLayout:
    """The layout of `model`'s KV in bfloat16.

    Raises:
        UnsupportedError: the model's KV is not one K and V a layer.
    """
    return model_layout(model.config, block_tokens, KV_DTYPE)


def compute_blocks(model: Any, tokens: Sequence[int], layout: BlockLayout) -> tuple[bytes, ...]:
    """The canonical blocks of `tokens`, computed by `model`; a last part of a block is left out."""
    whole = len(tokens) // layout.block_tokens
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(_row(model, tokens), past_key_values=cache, logits_to_keep=1)
    dtype = getattr(torch, layout.dtype)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
    return tuple(bytes(block) for _, block in canonical_blocks(cache, layout, 0, whole))


def cache_of(model: Any, blocks: Sequence[bytes], layout: BlockLayout) -> DynamicCache:
    """A cache in the model's dtype that holds `blocks` from position 0."""
    staging = Staging(layout, len(blocks))
    for i, block in enumerate(blocks):
        staging.fill(i, memoryview(block))
    cache = staging.to_cache(len(blocks), model.config, model.device)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.to(model.dtype), layer.values.to(model.dtype)
    return cache


def logits_after(model: Any, cache: DynamicCache, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Logits `[len(tokens), vocabulary]` of `tokens` after `cache`, which stays as it was."""
    held = cache.get_seq_length()
    with torch.no_grad():
        out = model(_row(model, tokens), past_key_values=cache).logits[0]
    cache.crop(held - cache.get_seq_length())
    logits: NDArray[np.float32] = out.float().cpu().numpy()
    return logits


def greedy_after(
    model: Any,
    cache: DynamicCache,
    tokens: Sequence[int],
    count: int,
    *,
    ends: Callable[[int], bool] = lambda _token: False,
) -> list[int]:
    """At most `count` greedy tokens after `cache` and `tokens`, up to the first that `ends` them.

    The cache grows by what was fed.
    """
    feed, out = list(tokens), list[int]()
    with torch.no_grad():
        while len(out) < count:
            logits = model(_row(model, feed), past_key_values=cache, logits_to_keep=1).logits
            out.append(int(logits[0, -1].argmax()))
            if ends(out[-1]):
                break
            feed = out[-1:]
    return out


def greedy_like(
    model: Any,
    cache: DynamicCache,
    tokens: Sequence[int],
    expected: Sequence[int],
    *,
    ends: Callable[[int], bool],
) -> tuple[list[int], int]:
    """The greedy answer after `cache` and `tokens`, and how many of its tokens are as `expected`.

    One pass over the expected answer finds where this one parts from it: two greedy answers are
    equal up to the first token that differs. Only what follows is decoded token by token, up to the
    length of `expected` or to the first token that `ends` it. The cache may have grown.
    """
    found = logits_after(model, cache, [*tokens, *expected[:-1]])[len(tokens) - 1 :]
    answer = [int(token) for token in found.argmax(axis=1)]
    same = agreed_tokens(expected, answer)
    if same == len(expected):
        return list(expected), same
    answer = answer[: same + 1]
    if not any(map(ends, answer)):
        more = len(expected) - len(answer)
        answer += greedy_after(model, cache, [*tokens, *answer], more, ends=ends)
    return answer, same


def _row(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([list(tokens)], device=model.device)
