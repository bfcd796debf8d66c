"""One set of blocks for two engines: what vLLM computed Transformers continues, and the reverse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import EXACT_AND_ONE, LONG, MEDIUM, Reference, kvist

from kvist.connectors.identity import fingerprint
from kvist.policy.leaf_lru import LeafLru
from kvist.store import TieredStore
from kvist.tiers.dram import Arena
from kvist.tiers.ssd import SsdTier

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]

BLOCK = 32
NEW = 6
BY_TRANSFORMERS = [LONG, EXACT_AND_ONE]
BY_VLLM = MEDIUM[:2]
LOGIT_TOLERANCE = 1e-3  # float32; the two engines sum in another order


@contextmanager
def in_transformers(model: Any, model_path: Path, folder: Path) -> Iterator[Any]:
    """Transformers over the folder that vLLM uses, while vLLM does not run."""
    from kvist.connectors.transformers import TransformersKvist, model_keyspace

    keyspace = model_keyspace(model, model_path=model_path, block_tokens=BLOCK)
    size_bytes = keyspace.layout.block_bytes
    tier = SsdTier.open(folder, keyspace=fingerprint(keyspace), capacity_bytes=512 << 20)
    arena = Arena(64 * (size_bytes + 4096), slot_bytes=size_bytes)
    with TieredStore(arena, LeafLru(), tier, raw_bytes=size_bytes) as store:
        yield TransformersKvist.open(
            model, store=store, model_path=model_path, block_tokens=BLOCK, read_deadline_s=60
        )
        assert store.flush(60)


def answer(generate: Any, prompt: list[int]) -> tuple[list[int], Any]:
    """Greedy tokens, and the logits of the first of them."""
    import torch

    out = generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), out.logits[0][0]


def test_each_engine_continues_what_the_other_has_computed(
    start_engine: Any, reference: Reference, smollm2: Any, smollm2_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "ssd"
    with in_transformers(smollm2, smollm2_folder, folder) as kv:
        for prompt in BY_TRANSFORMERS:
            assert answer(kv.generate, prompt)[0] == reference.of([prompt])[0]
            assert kv.last.saved_blocks >= len(prompt) // BLOCK

    engine = start_engine(kv_transfer_config=kvist(folder))
    assert engine.generate(BY_TRANSFORMERS).tokens == reference.of(BY_TRANSFORMERS)
    assert engine.loaded_tokens("ssd") == sum(len(p) // BLOCK * BLOCK for p in BY_TRANSFORMERS)
    assert engine.generate(BY_VLLM).tokens == reference.of(BY_VLLM)
    engine.reset()
    engine.close()

    with in_transformers(smollm2, smollm2_folder, folder) as kv:
        for prompt in BY_VLLM:
            fresh_tokens, fresh_logits = answer(smollm2.generate, prompt)
            tokens, logits = answer(kv.generate, prompt)
            assert kv.last.tokens_by_tier == {"ssd": len(prompt) // BLOCK * BLOCK}
            assert kv.last.faults == {}
            assert tokens == fresh_tokens == reference.of([prompt])[0]
            assert float((logits - fresh_logits).abs().max()) < LOGIT_TOLERANCE
