"""Blended prompts beside their full prefill, on a tiny model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvist.bench.blend.prompts import PassagePrompt  # noqa: E402
from kvist.bench.quality.blend_report import blend_rows, removed_ratio  # noqa: E402
from kvist.bench.quality.blending import Blender, Stored  # noqa: E402
from kvist.bench.quality.run import Subject, subject_of  # noqa: E402
from kvist.bench.quality.samples import Settings  # noqa: E402
from kvist.bench.quality.session import measure  # noqa: E402
from kvist.bench.quality.texts import generated_texts  # noqa: E402
from kvist.core.errors import ConfigError, UnsupportedError  # noqa: E402

pytestmark = pytest.mark.engines

SETTINGS = Settings(
    model="tiny",
    texts=["generated"],
    contexts=1,
    context_tokens=64,
    follow_tokens=24,
    greedy_tokens=8,
    block_tokens=32,
    questions=0,
    answer_tokens=6,
    prompts=2,
)


class Quiet:
    """Counts steps."""

    def __init__(self) -> None:
        self.expected, self.steps = 0, 0

    def expect(self, steps: int) -> None:
        self.expected = steps

    def step(self, text: str) -> None:
        self.steps += 1

    def say(self, text: str) -> None:
        raise AssertionError(text)


@pytest.fixture(scope="module")
def blender(tiny_model: Any) -> Blender:
    return Blender(tiny_model)


@pytest.fixture(scope="module")
def stored(blender: Blender) -> Stored:
    rng = np.random.default_rng(3)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, 97, count).tolist())

    return blender.store(PassagePrompt("p", draw(9), (draw(30), draw(40)), draw(7)), 8)


def test_reference_is_the_models_own_prefill_and_greedy_answer(
    stored: Stored, tiny_model: Any
) -> None:
    tokens = stored.prompt.tokens
    with torch.no_grad():
        plain = tiny_model(torch.tensor([tokens])).logits[0, -7:].numpy()
    assert np.abs(plain - stored.logits).max() < 1e-3 * plain.std()
    for token in stored.answer:
        with torch.no_grad():
            assert token == int(tiny_model(torch.tensor([tokens])).logits[0, -1].argmax())
        tokens.append(token)


def test_computing_all_again_changes_nothing_and_nothing_changes_most(
    blender: Blender, stored: Stored
) -> None:
    naive, half, whole = (blender.blend(stored, ratio) for ratio in (0.0, 0.5, 1.0))
    assert whole.comparison.kl_nats.max() < 1e-8
    assert whole.answer == stored.answer
    assert (whole.same_tokens, whole.repaired_tokens) == (8, 70)
    assert naive.comparison.kl_nats.mean() > half.comparison.kl_nats.mean() > 1e-6
    assert naive.repaired_tokens == 0
    assert naive.cached_tokens == 70


def test_blending_leaves_the_stored_kv_as_it_was(blender: Blender, stored: Stored) -> None:
    before = stored.keys.clone(), stored.values.clone()
    first = blender.blend(stored, 0.3)
    assert torch.equal(stored.keys, before[0])
    assert torch.equal(stored.values, before[1])
    assert np.array_equal(blender.blend(stored, 0.3).comparison.kl_nats, first.comparison.kl_nats)


@pytest.fixture(scope="module")
def subject(tiny_model: Any, tiny_tokenizer: Any) -> Subject:
    return subject_of(tiny_model, tiny_tokenizer, SETTINGS.block_tokens)


def test_run_has_a_row_for_each_way_and_goes_on_where_it_was(
    subject: Subject, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    texts, file, screen = generated_texts(tiny_tokenizer, 1, 89, 4), tmp_path / "s.jsonl", Quiet()
    found = measure(subject, [], texts, SETTINGS, screen, ratios=[0.0, 0.5, 1.0], samples=file)
    assert screen.steps == screen.expected == 4 * 2
    assert [row.way for row in found.blend] == ["full", "prefix-only", "0", "0.5", "1"]
    full, prefix, naive, half, whole = found.blend
    assert full.kl_nats_mean == prefix.kl_nats_mean == 0
    assert full.computed_ratio == 1
    assert naive.computed_ratio < half.computed_ratio < whole.computed_ratio
    assert whole.computed_ratio == prefix.computed_ratio < 1
    assert naive.kl_nats_mean > half.kl_nats_mean > whole.kl_nats_mean
    assert (naive.prompts, removed_ratio(naive, found.blend)) == (2, 0)
    size = file.stat().st_size
    again = measure(subject, [], texts, SETTINGS, Quiet(), ratios=[0.0, 0.5, 1.0], samples=file)
    assert again.blend == found.blend
    assert file.stat().st_size == size


def test_questions_that_are_too_few_are_refused(subject: Subject, tiny_tokenizer: Any) -> None:
    texts = generated_texts(tiny_tokenizer, 1, 89, 1)
    with pytest.raises(ConfigError, match="there are 1 questions, not 2"):
        measure(subject, [], texts, SETTINGS, Quiet(), ratios=[0.5])


def test_passages_too_long_are_cut_and_their_answers_not_judged(
    subject: Subject, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """Entries of the gazetteer have more than 192 characters, which are this model's tokens."""
    texts = generated_texts(tiny_tokenizer, 1, 89, 4)
    found = measure(subject, [], texts, SETTINGS, Quiet(), ratios=[0.5])
    assert {row.questions for row in found.blend} == {0}
    short = msgspec.structs.replace(SETTINGS, prompts=1)
    question = texts.questions[0]
    passages = (question.passages[0][:150],)
    brief = replace(texts, questions=(replace(question, passages=passages),))
    judged = measure(subject, [], brief, short, Quiet(), ratios=[0.5])
    assert {row.questions for row in judged.blend} == {1}
    assert all(row.f1 is not None for row in judged.blend)


def test_questions_whose_passages_need_no_cut_come_first(
    subject: Subject, tiny_tokenizer: Any
) -> None:
    texts = generated_texts(tiny_tokenizer, 1, 89, 4)
    brief = replace(texts.questions[3], passages=(texts.questions[3].passages[0][:150],))
    mixed = replace(texts, questions=(*texts.questions[:3], brief))
    one = msgspec.structs.replace(SETTINGS, prompts=1)
    assert measure(subject, [], mixed, one, Quiet(), ratios=[0.5]).blend[0].questions == 1
    both = measure(subject, [], mixed, SETTINGS, Quiet(), ratios=[0.5]).blend[0]
    assert (both.prompts, both.questions) == (2, 1)


def test_model_that_cannot_be_blended_is_refused(tiny_model: Any, tiny_tokenizer: Any) -> None:
    class Other:
        config = type("Config", (), {"model_type": "unheard-of", "vocab_size": 97})()
        generation_config = None
        device = "cpu"

    with pytest.raises(UnsupportedError):
        Blender(Other())


def test_ways_without_samples_have_no_row() -> None:
    from kvist.bench.quality.samples import SampleLog

    assert blend_rows(["full", "0"], SampleLog(SETTINGS)) == []
