"""Blend on a real model: the default guard, and answers that hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvist.accel.blend.proof import prove
from kvist.accel.blend.relocate import Relocation
from kvist.accel.blend.repair import RepairOutcome, repair
from kvist.accel.blend.schedule import RepairPlan
from kvist.accel.blend.transformers_model import TransformersBlendModel
from kvist.bench.blend.prompts import PassagePrompt, passage_prompts
from kvist.bench.blend.quality import measure_prompt, stored_passages
from kvist.connectors.transformers import BlendOutcome, BlendSettings, TransformersKvist

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> PassagePrompt:
    return passage_prompts(tokenizer, count=1, passages=3, passage_tokens=70)[0]


@pytest.fixture
def kv(
    smollm2: Any, smollm2_folder: Path, memory_store_class: Any, prompt: PassagePrompt
) -> TransformersKvist:
    """A store that holds the passages."""
    kv = TransformersKvist.open(
        smollm2,
        store=lambda keyspace: memory_store_class(keyspace.layout.block_bytes),
        model_path=smollm2_folder,
        block_tokens=16,
        blend=BlendSettings(),
    )
    assert kv.blend_off == ""
    for passage in prompt.passages:
        first_token(kv, list(passage))
    return kv


def first_token(kv: TransformersKvist, tokens: list[int]) -> int:
    row = torch.tensor([tokens])
    out = kv.generate(row, do_sample=False, max_new_tokens=1, min_new_tokens=1)
    return int(out[0, -1])


def shuffled(prompt: PassagePrompt) -> list[int]:
    body = [t for i in (2, 0, 1) for t in prompt.passages[i]]
    return [*prompt.intro, *body, *prompt.question]


def test_the_proof_holds_for_smollm2(smollm2: Any) -> None:
    prove(TransformersBlendModel(smollm2), smollm2.config.vocab_size)


def test_the_default_guard_passes_text_and_stops_keys_that_were_not_moved(
    kv: TransformersKvist, prompt: PassagePrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = shuffled(prompt)
    first_token(kv, tokens)
    assert kv.last.blend.outcome is BlendOutcome.BLENDED
    assert 0 < kv.last.blend.deviation_ratio < 0.02  # far from the bound
    monkeypatch.setattr(Relocation, "apply", lambda self, keys, rope: keys)
    first_token(kv, tokens)
    assert kv.last.blend.outcome is BlendOutcome.DEVIATES


def test_the_default_guard_stops_rows_of_other_tokens(smollm2: Any, prompt: PassagePrompt) -> None:
    adapter = TransformersBlendModel(smollm2)
    keys, values, cached = stored_passages(adapter, prompt)
    start, stop = next(prompt.spans())
    values[:, :, start:stop] = values[:, :, start:stop].flip(dims=(2,))
    plan = RepairPlan(0.15, most_deviation_ratio=BlendSettings().most_deviation_ratio)
    tokens = torch.tensor(prompt.tokens)
    assert repair(adapter, tokens, keys, values, cached, plan).outcome is RepairOutcome.DEVIATES


def test_repair_takes_most_of_what_naive_concatenation_loses(
    smollm2: Any, prompt: PassagePrompt
) -> None:
    row = measure_prompt(TransformersBlendModel(smollm2), prompt)
    naive, whole = row.ratios["0"], row.ratios["1"]
    assert whole.kl_question < 1e-6
    assert row.ratios["0.15"].kl_question < 0.5 * naive.kl_question
    assert row.ratios["0.6"].kl_question < row.ratios["0.15"].kl_question
