"""`kl_of`: a transform of the KV, and what the model makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvist.bench.quality.divergence import Context, diverge, kl_of, prepare  # noqa: E402
from kvist.bench.quality.forward import cache_of, compute_blocks, kv_layout  # noqa: E402
from kvist.core.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.engines

BLOCK, FOLLOW, GREEDY = 16, 20, 12


def _tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


@pytest.fixture(scope="module")
def contexts(tiny_model: Any) -> list[Context]:
    layout = kv_layout(tiny_model, BLOCK)
    return [
        prepare(tiny_model, _tokens(i, 90), layout, follow_tokens=FOLLOW, greedy_tokens=GREEDY)
        for i in range(3)
    ]


def _cast(dtype: Any) -> Any:
    def transform(block: memoryview) -> bytes:
        raw = torch.frombuffer(bytearray(block), dtype=torch.bfloat16)
        return raw.to(dtype).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()

    return transform


def test_kv_that_comes_back_unchanged_changes_nothing(contexts: list[Context]) -> None:
    found = kl_of(bytes, contexts)
    assert found.kl_nats_mean == found.kl_nats_p95 == 0
    assert found.top1_ratio == found.greedy_ratio == 1
    assert (found.contexts, found.positions) == (3, 3 * FOLLOW)


def test_a_coarser_cast_diverges_more(contexts: list[Context]) -> None:
    e4m3 = kl_of(_cast(torch.float8_e4m3fn), contexts)
    e5m2 = kl_of(_cast(torch.float8_e5m2), contexts)
    zeros = kl_of(lambda block: bytes(len(block)), contexts)
    assert 0 < e4m3.kl_nats_mean < e5m2.kl_nats_mean < zeros.kl_nats_mean
    assert e4m3.kl_nats_mean <= e4m3.kl_nats_p95
    assert zeros.greedy_ratio < 1
    assert zeros.perplexity != kl_of(bytes, contexts).perplexity


def test_reference_is_the_model_on_its_own_kv(contexts: list[Context], tiny_model: Any) -> None:
    """Logits from the blocks equal one plain pass, but for the KV's rounding to bfloat16."""
    context, tokens = contexts[0], _tokens(0, 90)
    held = len(context.blocks) * BLOCK
    assert tokens[held : held + FOLLOW] == list(context.follow)
    assert tokens[held + 1 : held + FOLLOW + 1] == list(context.targets)
    with torch.no_grad():
        plain = tiny_model(torch.tensor([tokens[: held + FOLLOW]])).logits[0, held:]
    assert np.abs(plain.numpy() - context.logits).max() < 0.25 * plain.std()
    assert np.abs(plain.numpy() - context.logits).mean() < 0.02 * plain.std()


def test_greedy_agreement_is_that_of_two_answers_decoded_freely(
    contexts: list[Context], tiny_model: Any
) -> None:
    parted = set()
    for context in contexts:
        for cast in (torch.float8_e4m3fn, torch.float8_e5m2):
            blocks = [_cast(cast)(memoryview(b)) for b in context.blocks]
            cache = cache_of(tiny_model, blocks, context.layout)
            feed, answer = [context.follow[0]], []
            for _ in range(GREEDY):
                with torch.no_grad():
                    out = tiny_model(torch.tensor([feed]), past_key_values=cache)
                answer.append(int(out.logits[0, -1].argmax()))
                feed = answer[-1:]
            same = next(
                (i for i, (a, b) in enumerate(zip(context.greedy, answer, strict=True)) if a != b),
                GREEDY,
            )
            assert diverge(context, blocks).greedy_same_tokens == same
            parted.add(same)
    assert len(parted) > 1, "every answer parted at the same token: the test shows nothing"


def test_blocks_hold_the_models_keys_and_values_in_canonical_order(tiny_model: Any) -> None:
    tokens, layout = _tokens(5, 2 * BLOCK), kv_layout(tiny_model, BLOCK)
    blocks = compute_blocks(tiny_model, tokens, layout)
    with torch.no_grad():
        cache = tiny_model(torch.tensor([tokens])).past_key_values
    shape = (layout.layers, 2, layout.kv_heads, BLOCK, layout.head_dim)
    second = torch.frombuffer(bytearray(blocks[1]), dtype=torch.bfloat16).view(shape)
    want = cache.layers[1].values[0, :, BLOCK:].to(torch.bfloat16)
    assert torch.equal(second[1, 1], want)


def test_transform_of_another_size_is_refused(contexts: list[Context]) -> None:
    with pytest.raises(ValueError, match="bytes for a block"):
        kl_of(lambda block: bytes(block)[:-2], contexts)


def test_without_contexts_there_is_no_result() -> None:
    with pytest.raises(ValueError, match="no context"):
        kl_of(bytes, [])


def test_text_without_a_whole_block_is_refused(tiny_model: Any) -> None:
    with pytest.raises(ConfigError, match="too short"):
        prepare(tiny_model, _tokens(1, 30), kv_layout(tiny_model, BLOCK), follow_tokens=FOLLOW)
