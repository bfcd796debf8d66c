"""Profiles a Transformers model for `cachegen`: its KV over texts, and what errors in it cost.

For each context the model reads the first tokens; the KV that it keeps is the sample. It then goes
on over the tokens that follow, with that KV as a variable: tokens are drawn from its own
distributions, and the derivative of their log-likelihood by every value of the KV is squared and
averaged: the diagonal of the Fisher information. One draw a context is enough, since every token of
it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvist.codec.cachegen.profile import Sample, Sensitivity, build_table, turning_pays
from kvist.codec.cachegen.table import ProfileTable
from kvist.core.errors import ConfigError, UnsupportedError

CONTEXT_TOKENS = 512
ANSWER_TOKENS = 128
_SKIPPED = 4  # first tokens: attention sinks, whose errors cost a thousand times more
_SEED = 20260

Progress = Callable[[int, int], None]


def profile_model(
    model: Any, texts: Sequence[Sequence[int]], progress: Progress | None = None
) -> ProfileTable:
    """The `cachegen` table of a model.

    Args:
        model: a decoder-only Transformers model whose cache is one K and V a layer.
        texts: token ids of contexts; the last quarter, `ANSWER_TOKENS` at most, is gone on over.
        progress: told how many contexts are done, of how many.

    Raises:
        ConfigError: there are no texts, or some are too short.
        UnsupportedError: the model keeps another kind of cache.
    """
    if not texts or min(map(len, texts)) < 64:
        raise ConfigError("a profile needs texts of at least 64 tokens", path="--texts")
    if not all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers):
        raise UnsupportedError("a cache that is not one K and V per layer")
    for parameter in model.parameters():
        parameter.requires_grad = False
    samples, squares, answered = [], [], 0
    for done, ids in enumerate(texts):
        if progress is not None:
            progress(done, len(texts))
        answer = min(ANSWER_TOKENS, len(ids) // 4)
        kv = _read(model, ids[:-answer])
        squares.append(_squares(model, kv, ids[-answer:], seed=_SEED + done))
        samples.append(Sample(_stored(kv)))
        answered += answer
    sensitivity = Sensitivity(
        np.mean(squares, axis=0, dtype=np.float64), answer_tokens=answered // len(texts)
    )
    inv_freq = frequencies_of(model)
    if inv_freq is not None and not turning_pays(samples, sensitivity, inv_freq):
        inv_freq = None
    return build_table(samples, sensitivity, inv_freq=inv_freq)


def frequencies_of(model: Any) -> npt.NDArray[np.float64] | None:
    """The inverse frequencies of a model's RoPE, if all its layers turn keys by the same."""
    found = [
        buffer.detach().cpu().double().numpy()
        for name, buffer in model.named_buffers()
        if name.rsplit(".", 1)[-1] == "inv_freq" and buffer.ndim == 1
    ]
    if not found or any(not np.array_equal(found[0], other) for other in found):
        return None
    return np.asarray(found[0], np.float64)


def _read(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """`[layer, kind, head, token, D]` of a context."""
    with torch.no_grad():
        tokens = torch.tensor([list(ids)], device=model.device)
        cache = DynamicCache(config=model.config)
        model(tokens, past_key_values=cache, use_cache=True)
        return torch.stack([torch.stack((la.keys[0], la.values[0])) for la in cache.layers])


def _squares(
    model: Any, kv: torch.Tensor, answer: Sequence[int], *, seed: int
) -> npt.NDArray[np.float64]:
    """`[layer, kind, head, D]`: mean squared derivatives over the tokens of a context."""
    variable = kv.clone()
    variable.requires_grad = True
    cache = DynamicCache(config=model.config)
    for layer in range(len(variable)):
        cache.update(variable[layer, 0][None], variable[layer, 1][None], layer)
    tokens = torch.tensor([list(answer)], device=model.device)
    logits = model(tokens, past_key_values=cache, use_cache=True).logits[0].float()
    likely = torch.log_softmax(logits, -1)
    draw = torch.Generator(device=likely.device).manual_seed(seed)
    drawn = torch.multinomial(likely.detach().exp(), 1, generator=draw)
    (slopes,) = torch.autograd.grad(likely.gather(1, drawn).sum(), variable)
    square = slopes.float().square()[:, :, :, _SKIPPED:].mean(3)
    return np.asarray(square.double().cpu().numpy(), np.float64)


def _stored(kv: torch.Tensor) -> npt.NDArray[Any]:
    """In the dtype that a store keeps: bfloat16 as its bits, others as float32."""
    if kv.dtype == torch.bfloat16:
        return np.asarray(kv.cpu().contiguous().view(torch.int16).numpy()).view(np.uint16)
    return np.asarray(kv.float().cpu().contiguous().numpy())
