"""How much a change of a context's KV changes what the model says next.

A `Context` is a text whose KV is computed once and kept as canonical blocks, with what the model
predicts after it. `kl_of` puts every block through a transform (a codec's encode and decode, say)
and has the model go on from the result:

* over the text that truly follows: KL(raw ‖ transformed) of the next token's distribution at every
  position, perplexity, and whether the most probable token stays the same;
* over its own greedy answer: how long that answer stays the same. One pass over the raw answer
  tells this, for two greedy answers are equal up to the first token that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvist.bench.document import long_document
from kvist.bench.quality.forward import (
    cache_of,
    compute_blocks,
    greedy_after,
    kv_layout,
    logits_after,
)
from kvist.bench.quality.measures import Floats, agreed_tokens, compare, perplexity
from kvist.codec.frame import Buffer
from kvist.core.errors import ConfigError
from kvist.core.layout import BlockLayout

CONTEXT_TOKENS = 512
FOLLOW_TOKENS = 128
GREEDY_TOKENS = 32
BLOCK_TOKENS = 128

Transform = Callable[[memoryview], Buffer]


@dataclass(frozen=True, slots=True)
class Context:
    """A text's KV and what `model` predicts after it.

    `blocks` are canonical blocks of `layout` from position 0. `follow` are the tokens that are
    fed after them, `targets` the ones that truly come next, `logits` `[len(follow), vocabulary]`
    what the model predicts from the raw blocks. `greedy` is its own answer after `follow[0]`.
    """

    model: Any
    layout: BlockLayout
    blocks: tuple[bytes, ...]
    follow: tuple[int, ...]
    targets: tuple[int, ...]
    logits: NDArray[np.float32]
    greedy: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """One context after a transform; arrays have one entry a position of the following text."""

    kl_nats: Floats
    surprise_nats: Floats
    same_top: NDArray[np.bool_]
    greedy_same_tokens: int
    greedy_tokens: int


@dataclass(frozen=True, slots=True)
class KlResult:
    """Several contexts after a transform, all positions together.

    `kl_nats_mean` and `kl_nats_p95` are of KL(raw ‖ transformed) of the next token; 0 where
    nothing changes. `top1_ratio` is the share of positions whose most probable token stays,
    `greedy_ratio` the share of the greedy answers that stays before the first change.
    """

    contexts: int
    positions: int
    kl_nats_mean: float
    kl_nats_p95: float
    perplexity: float
    top1_ratio: float
    greedy_ratio: float


def prepare(
    model: Any,
    tokens: Sequence[int],
    layout: BlockLayout,
    *,
    follow_tokens: int = FOLLOW_TOKENS,
    greedy_tokens: int = GREEDY_TOKENS,
) -> Context:
    """Computes the KV of the whole blocks of `tokens` that leave room for the text after them.

    Args:
        model: a Transformers model, float32 for a reference that rounding does not blur.
        layout: from `kv_layout`.

    Raises:
        ConfigError: `tokens` are fewer than a block and `follow_tokens` and one more.
    """
    held = (len(tokens) - follow_tokens - 1) // layout.block_tokens * layout.block_tokens
    if held < layout.block_tokens:
        raise ConfigError(
            f"a text of {len(tokens)} tokens is too short for a block of {layout.block_tokens} "
            f"and {follow_tokens} tokens after it"
        )
    blocks = compute_blocks(model, tokens[:held], layout)
    follow = tuple(tokens[held : held + follow_tokens])
    cache = cache_of(model, blocks, layout)
    logits = logits_after(model, cache, follow)
    greedy = greedy_after(model, cache, follow[:1], greedy_tokens)
    targets = tuple(tokens[held + 1 : held + follow_tokens + 1])
    return Context(model, layout, blocks, follow, targets, logits, tuple(greedy))


def diverge(context: Context, blocks: Sequence[bytes]) -> Divergence:
    """What the model makes of `blocks` in place of the context's own."""
    cache = cache_of(context.model, blocks, context.layout)
    found = compare(
        context.logits, logits_after(context.model, cache, context.follow), context.targets
    )
    same = 0
    if context.greedy:
        fed = [context.follow[0], *context.greedy[:-1]]
        answer = logits_after(context.model, cache, fed).argmax(axis=1).tolist()
        same = agreed_tokens(context.greedy, answer)
    return Divergence(found.kl_nats, found.surprise_nats, found.same_top, same, len(context.greedy))


def kl_of(transform: Transform, contexts: Iterable[Context]) -> KlResult:
    """What `transform` of every canonical block does to the model's predictions.

    Args:
        transform: maps the bytes of one raw block (`context.layout`, bfloat16) to as many bytes.
        contexts: from `prepare` or `demo_contexts`; at least one.

    Raises:
        ValueError: there is no context, or the transform returns another number of bytes.
    """
    found = []
    for context in contexts:
        blocks = [bytes(transform(memoryview(block))) for block in context.blocks]
        sizes = {len(block) for block in blocks} - {context.layout.block_bytes}
        if sizes:
            raise ValueError(f"{sizes.pop()} bytes for a block of {context.layout.block_bytes}")
        found.append(diverge(context, blocks))
    return together(found)


def together(parts: Sequence[Divergence]) -> KlResult:
    """Several contexts as one result; every position counts the same.

    Raises:
        ValueError: there are no parts.
    """
    if not parts:
        raise ValueError("no context was measured")
    kl = np.concatenate([part.kl_nats for part in parts])
    answered = sum(part.greedy_tokens for part in parts)
    return KlResult(
        contexts=len(parts),
        positions=len(kl),
        kl_nats_mean=float(np.mean(kl)),
        kl_nats_p95=float(np.quantile(kl, 0.95, method="higher")),
        perplexity=perplexity(np.concatenate([part.surprise_nats for part in parts])),
        top1_ratio=float(np.mean(np.concatenate([part.same_top for part in parts]))),
        greedy_ratio=sum(p.greedy_same_tokens for p in parts) / answered if answered else 1.0,
    )


def load(folder: Path) -> tuple[Any, Any]:
    """The model in `folder`, in float32 on the CPU, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(str(folder))


def demo_contexts(
    count: int = 8, *, context_tokens: int = CONTEXT_TOKENS, block_tokens: int = BLOCK_TOKENS
) -> list[Context]:
    """`count` contexts of the demo model over the generated document; about 40 MB each.

    Raises:
        ConfigError: the model cannot be had.
    """
    from kvist.bench.smollm2 import ensure_smollm2

    model, tokenizer = load(ensure_smollm2("float32"))
    need = context_tokens + FOLLOW_TOKENS + 1
    tokens = list(tokenizer.encode(long_document(count * need, tokenizer)))
    layout = kv_layout(model, block_tokens)
    return [prepare(model, tokens[i * need : (i + 1) * need], layout) for i in range(count)]
