"""The blended prefill over a decoder of a few lines, against dense computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_decoder import VOCABULARY, TinyDecoder, dense

from kvist.accel.blend.relocate import relocate
from kvist.accel.blend.repair import Repaired, RepairOutcome, repair
from kvist.accel.blend.schedule import RepairPlan, kept_tokens

SPANS = ((3, 13), (13, 22), (25, 33))  # 22 to 25 and the last tokens were never cached
TOKENS = 37
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


class Prompt:
    """Spans computed each alone and moved to where they stand, and nothing else."""

    def __init__(self) -> None:
        self.model = TinyDecoder()
        self.tokens = torch.randint(
            VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(5)
        )
        shape = self.model.shape
        size = (shape.layers, shape.kv_heads, TOKENS, shape.head_dim)
        self.keys, self.values = torch.full(size, torch.nan), torch.full(size, torch.nan)
        self.cached = torch.zeros(TOKENS, dtype=torch.bool)
        for start, stop in SPANS:
            keys, values, _ = dense(self.model, self.tokens[start:stop])
            here = torch.arange(stop - start)
            self.keys[:, :, start:stop] = relocate(keys, here, here + start, self.model.rope(0))
            self.values[:, :, start:stop] = values
            self.cached[start:stop] = True

    def repair(self, ratio: float, **more: Any) -> Repaired:
        exact = more.pop("exact_tokens", 0)
        return repair(
            self.model,
            self.tokens,
            self.keys.clone(),
            self.values.clone(),
            self.cached,
            RepairPlan(ratio, **more),
            exact_tokens=exact,
        )


@pytest.fixture
def prompt() -> Prompt:
    return Prompt()


def _apart(found: Repaired, keys: Any) -> float:
    return float((found.keys - keys).norm())


def test_ratio_1_equals_full_prefill(prompt: Prompt) -> None:
    keys, values, hidden = dense(prompt.model, prompt.tokens)
    found = prompt.repair(1.0)
    torch.testing.assert_close(found.keys, keys, **CLOSE)
    torch.testing.assert_close(found.values, values, **CLOSE)
    torch.testing.assert_close(found.hidden, hidden[~prompt.cached], **CLOSE)
    assert found.outcome is RepairOutcome.WHOLE
    assert found.repaired_tokens == int(prompt.cached.sum())


def test_ratio_0_equals_naive_concatenation(prompt: Prompt) -> None:
    frozen = prompt.cached, prompt.keys, prompt.values
    keys, values, hidden = dense(prompt.model, prompt.tokens, frozen)
    found = prompt.repair(0.0)
    assert torch.equal(found.keys[:, :, prompt.cached], prompt.keys[:, :, prompt.cached])
    torch.testing.assert_close(found.keys, keys, **CLOSE)
    torch.testing.assert_close(found.values, values, **CLOSE)
    torch.testing.assert_close(found.hidden, hidden[~prompt.cached], **CLOSE)
    assert found.outcome is RepairOutcome.BLENDED
    assert found.repaired_tokens == 0


def test_more_repair_comes_closer_to_full_prefill(prompt: Prompt) -> None:
    keys, _, _ = dense(prompt.model, prompt.tokens)
    apart = [_apart(prompt.repair(r), keys) for r in (0.0, 0.2, 0.5, 0.8, 1.0)]
    assert apart == sorted(apart, reverse=True)
    assert apart[0] > 10 * apart[-1]


def test_each_layer_computes_the_fresh_tokens_and_as_many_cached_as_planned(
    prompt: Prompt,
) -> None:
    ratio, cached = 0.4, int(prompt.cached.sum())
    found = prompt.repair(ratio)
    kept = kept_tokens(RepairPlan(ratio), cached, prompt.model.shape.layers)
    fresh = (~prompt.cached).nonzero()[:, 0].tolist()
    # The check layer projects every token; layers after it, what the one before has kept.
    asked = [TOKENS, TOKENS, *(len(fresh) + n for n in kept[:-1])]
    assert [len(rows) for rows in prompt.model.projected] == asked
    assert [rows[0] for rows in prompt.model.finished] == [
        TOKENS,
        *(len(fresh) + n for n in kept),
    ]
    for rows in prompt.model.projected:
        assert rows == sorted(rows)
        assert set(fresh) <= set(rows)
    for before, after in zip(prompt.model.projected, prompt.model.projected[1:], strict=False):
        assert set(after) <= set(before)
    assert found.fresh_positions.tolist() == fresh
    assert found.repaired_tokens == kept[0]


def test_the_tokens_that_deviate_most_are_computed_again(prompt: Prompt) -> None:
    broken = [5, 15, 28]
    clean, clean_values, _ = dense(prompt.model, prompt.tokens)
    prompt.keys, prompt.values = clean.clone(), clean_values.clone()
    prompt.values[:, :, broken] += 3.0
    found = prompt.repair(len(broken) / int(prompt.cached.sum()), spread_ratio=0.0)
    assert set(prompt.model.projected[-1]) - set(found.fresh_positions.tolist()) == set(broken)
    # What is left was right, so all is.
    torch.testing.assert_close(found.keys, clean, **CLOSE)
    torch.testing.assert_close(found.values, clean_values, **CLOSE)
    assert found.deviation_ratio < 1e-6


def test_a_matched_prefix_is_exact_and_is_not_computed(prompt: Prompt) -> None:
    keys, values, hidden = dense(prompt.model, prompt.tokens)
    prompt.keys[:, :, :13], prompt.values[:, :, :13] = keys[:, :, :13], values[:, :, :13]
    found = prompt.repair(1.0, exact_tokens=13)
    assert min(prompt.model.projected[0]) == 13
    torch.testing.assert_close(found.keys, keys, **CLOSE)
    fresh = ~prompt.cached
    fresh[:13] = False
    torch.testing.assert_close(found.hidden, hidden[fresh], **CLOSE)
    blended = prompt.repair(0.3, exact_tokens=13)
    assert torch.equal(blended.keys[:, :, :13], keys[:, :, :13])


def test_too_much_deviation_computes_everything(prompt: Prompt) -> None:
    keys, values, _ = dense(prompt.model, prompt.tokens)
    allowed = prompt.repair(0.15).deviation_ratio
    assert allowed > 0
    assert prompt.repair(0.15, most_deviation_ratio=allowed).outcome is RepairOutcome.BLENDED
    found = prompt.repair(0.15, most_deviation_ratio=allowed * 0.99)
    assert found.outcome is RepairOutcome.DEVIATES
    assert found.deviation_ratio == allowed
    torch.testing.assert_close(found.keys, keys, **CLOSE)
    torch.testing.assert_close(found.values, values, **CLOSE)


@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.6])
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_stored_kv_that_is_no_number_computes_everything(
    prompt: Prompt, layer: int, ratio: float
) -> None:
    """One row of one layer is enough: its weight of 0 times NaN is NaN for every row after it."""
    keys, _, _ = dense(prompt.model, prompt.tokens)
    prompt.values[layer, :, 7] = torch.nan  # as a codec that failed might leave it
    found = prompt.repair(ratio)
    assert found.keys.isfinite().all()
    if layer == 0 and ratio > 0:  # the first layer is computed for all, so its fault is gone
        assert found.outcome is RepairOutcome.BLENDED
    elif found.outcome is RepairOutcome.BLENDED:  # the row that deviates most is computed again
        assert ratio > 0
    else:
        assert found.outcome is RepairOutcome.DEVIATES
        torch.testing.assert_close(found.keys, keys, **CLOSE)


def test_nothing_cached_is_a_plain_prefill(prompt: Prompt) -> None:
    keys, _, hidden = dense(prompt.model, prompt.tokens)
    prompt.cached = torch.zeros(TOKENS, dtype=torch.bool)
    for ratio in (0.0, 0.15):
        found = prompt.repair(ratio)
        assert found.outcome is RepairOutcome.WHOLE
        torch.testing.assert_close(found.keys, keys, **CLOSE)
        torch.testing.assert_close(found.hidden, hidden, **CLOSE)


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_all_cached_leaves_no_fresh_rows(prompt: Prompt, ratio: float) -> None:
    keys, values, _ = dense(prompt.model, prompt.tokens)
    prompt.keys, prompt.values = keys, values
    prompt.cached = torch.ones(TOKENS, dtype=torch.bool)
    found = prompt.repair(ratio)
    assert found.hidden.shape[0] == 0
    torch.testing.assert_close(found.keys, keys, **CLOSE)


def test_the_callers_marks_are_not_changed(prompt: Prompt) -> None:
    before, tokens = prompt.cached.clone(), prompt.tokens.clone()
    prompt.repair(0.3)
    assert torch.equal(prompt.cached, before)
    assert torch.equal(prompt.tokens, tokens)


def test_shapes_that_do_not_belong_together_are_refused(prompt: Prompt) -> None:
    for tokens, keys, cached, exact in [
        (prompt.tokens[:-1], prompt.keys, prompt.cached[:-1], 0),
        (prompt.tokens, prompt.keys[:-1], prompt.cached, 0),
        (prompt.tokens, prompt.keys, prompt.cached[:-1], 0),
        (prompt.tokens, prompt.keys, prompt.cached, TOKENS + 1),
    ]:
        with pytest.raises(ValueError, match=r"not|of"):
            repair(
                prompt.model, tokens, keys, prompt.values, cached, RepairPlan(0.1),
                exact_tokens=exact,
            )  # fmt: skip
