"""A LoRA adapter's blocks are its own: found again under any name, never by another adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import MEDIUM, EngineError, Reference, VllmEngine, kvist

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]

RANK, LAYERS, HIDDEN, VALUE = 8, 30, 576, 192
PROMPTS = MEDIUM[:2]


def _make_adapter(folder: Path, seed: int) -> str:
    """A random adapter in peft's format, strong enough to change the answer."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, rows in (("q_proj", HIDDEN), ("v_proj", VALUE)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = 0.2 * torch.randn(RANK, HIDDEN, generator=random)
            weights[f"{stem}.lora_B.weight"] = 0.2 * torch.randn(rows, RANK, generator=random)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "lora_dropout": 0.0,
        "base_model_name_or_path": "",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def engine(start_engine: Any, tmp_path_factory: pytest.TempPathFactory) -> VllmEngine:
    try:
        return start_engine(
            kv_transfer_config=kvist(tmp_path_factory.mktemp("lora") / "ssd"),
            enable_lora=True,
            max_lora_rank=RANK,
            max_loras=2,
        )
    except EngineError as e:
        reason = str(e).strip().splitlines()[-1]
        if "kvist" in str(e).lower().split("traceback")[-1]:
            raise
        pytest.skip(f"vLLM does not serve LoRA here: {reason}")


def test_adapters_never_share_blocks_but_each_finds_its_own(
    engine: VllmEngine, reference: Reference, tmp_path: Path
) -> None:
    one = _make_adapter(tmp_path / "adapter-1", 1)
    two = _make_adapter(tmp_path / "adapter-2", 2)
    cold = {}
    for lora in (None, one, two):  # each cold: what the other saved must not be found
        answer = engine.generate(PROMPTS, lora=lora)
        assert answer.cached == [0, 0]
        cold[lora] = answer.tokens
        engine.reset()
    assert engine.loaded_tokens() == 0
    assert cold[None] == reference.of(PROMPTS)
    assert cold[one] != cold[None] != cold[two] != cold[one]
    for lora in (two, None, one):
        before = engine.loaded_tokens()
        assert engine.generate(PROMPTS, lora=lora).tokens == cold[lora]
        assert engine.loaded_tokens() - before == 2 * 288
        engine.reset()
