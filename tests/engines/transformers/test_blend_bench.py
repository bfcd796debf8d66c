"""The benchmark of blend measures what it says, on a model of no size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny

from kvist.accel.blend.transformers_model import TransformersBlendModel
from kvist.bench.blend.prompts import PassagePrompt
from kvist.bench.blend.quality import RATIOS, kl_nats, measure
from kvist.bench.blend.report import curve
from kvist.bench.blend.speed import measure_ttft, ttft_text

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


def _prompt(name: str, seed: int, size: int = 40) -> PassagePrompt:
    drawn = torch.randint(3, 199, (6, size), generator=torch.Generator().manual_seed(seed)).tolist()
    passages = tuple(tuple(row) for row in drawn[:4])
    return PassagePrompt(name, tuple(drawn[4][:7]), passages, tuple(drawn[5][:9]))


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return tiny("default")


def test_kl_falls_to_nothing_as_all_is_computed_again(model: Any, tmp_path: Path) -> None:
    prompts = [_prompt(f"p{i}", i) for i in range(6)]
    rows = measure(TransformersBlendModel(model), prompts, tmp_path / "rows.jsonl")
    found = curve(rows)
    assert [row.ratio for row in found.rows] == [f"{ratio:g}" for ratio in RATIOS]
    naive, *_, whole = found.rows
    assert naive.kl_question > 0.01
    assert whole.kl_question < 1e-6
    assert whole.agree_ratio == 1
    assert found.cached_tokens == 160
    assert all(row.ratios["0.15"].repaired_tokens > 0 for row in rows)


def test_a_run_that_was_ended_goes_on_where_it_was(model: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    prompts = [_prompt(f"p{i}", i) for i in range(3)]
    adapter = TransformersBlendModel(model)
    first = measure(adapter, prompts[:2], file, ratios=[0.0, 1.0])
    with file.open("a") as out:
        out.write('{"name": "p2", "tok')  # killed in the middle of a line
    passes = []
    own = adapter.own_pass
    adapter.own_pass = lambda tokens: passes.append(len(tokens)) or own(tokens)  # type: ignore[method-assign]
    rows = measure(adapter, prompts, file, ratios=[0.0, 1.0])
    assert rows[:2] == first
    assert len(passes) == 5  # four passages and the whole of the third prompt
    assert measure(adapter, prompts, file, ratios=[0.0, 1.0]) == rows
    assert len(passes) == 5
    assert measure(adapter, prompts, file, ratios=[0.0, 0.3, 1.0]) != rows  # other ratios: again


def test_kl_is_that_of_the_definition() -> None:
    full, other = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0986122886681098]])
    # halves against (1/4, 3/4)
    want = 0.5 * torch.log(torch.tensor(0.5 / 0.25)) + 0.5 * torch.log(torch.tensor(0.5 / 0.75))
    assert float(kl_nats(full, other)[0]) == pytest.approx(float(want), abs=1e-6)
    assert float(kl_nats(full, full + 5)[0]) == pytest.approx(0.0, abs=1e-12)


def test_blended_prompts_are_measured_beside_full_prefill(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    prompt = _prompt("p", 1, size=70)
    found = measure_ttft(model, tmp_path, prompt, rounds=3, floor_ratio=0.15)
    assert sum(found.outcomes.values()) == 3
    assert found.tokens == 4 * 70 + 7 + 9
    assert found.full_s > 0
    assert found.blended_s > 0
    assert found.faster == pytest.approx(found.full_s / found.blended_s)
    assert found.faster_low <= found.faster_high
    assert "full prefill" in ttft_text(found)
