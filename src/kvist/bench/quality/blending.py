"""What blended KV does to a model's answers: a prompt of passages that were each computed alone.

The KV of each passage is what an earlier prompt that began with it left behind, moved to where the
passage stands now (`bench/blend`); `repair` computes the rest, and of the passages' tokens the
share that a ratio says. Compared is what the model says from then on with a prefill of everything:
KL(full ‖ blended) of the next token at every position of the question, and its greedy answer.

Ratio 0 is naive concatenation, ratio 1 computes everything. `bench/blend` has the curve of KL over
many more prompts; here the model also has to answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from kvist.accel.blend.proof import prove
from kvist.accel.blend.repair import repair
from kvist.accel.blend.schedule import RepairPlan
from kvist.accel.blend.transformers_model import TransformersBlendModel
from kvist.bench.blend.prompts import PassagePrompt
from kvist.bench.blend.quality import stored_passages
from kvist.bench.quality.forward import greedy_after, greedy_like
from kvist.bench.quality.measures import Comparison, compare


@dataclass(frozen=True, slots=True)
class Stored:
    """A prompt with the KV that is cached of it, and what a full prefill says after it.

    `keys` and `values` are `[layers, kv_heads, tokens, head_dim]`, already moved; `cached`
    `[tokens]` marks the passages. `logits` `[len(question), vocabulary]` and `answer`, greedy, are
    the full prefill's.
    """

    prompt: PassagePrompt
    keys: torch.Tensor
    values: torch.Tensor
    cached: torch.Tensor
    logits: NDArray[np.float32]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Blended:
    """A prompt at one ratio, beside its full prefill: `comparison` of every token of the question.

    `answer` is greedy and its first `same_tokens` are the full prefill's. `repaired_tokens` of
    `cached_tokens` were computed again.
    """

    comparison: Comparison
    answer: tuple[int, ...]
    same_tokens: int
    cached_tokens: int
    repaired_tokens: int


class Blender:
    """Blends prompts of one model. Keeps nothing of a prompt."""

    def __init__(self, model: Any, ends: Callable[[int], bool] = lambda _token: False) -> None:
        """Proves that the model can be blended; an answer that parts from the full one `ends`.

        Raises:
            UnsupportedError: it cannot.
        """
        self._model = model
        self._ends = ends
        self._view = TransformersBlendModel(model)
        prove(self._view, model.config.vocab_size, model.device)

    def store(self, prompt: PassagePrompt, answer_tokens: int) -> Stored:
        """Computes each passage alone, and the whole prompt for comparison."""
        keys, values, logits = self._view.own_pass(self._ids(prompt.tokens))
        full = self._all_but_last(keys, values)
        answer = greedy_after(self._model, full, prompt.question[-1:], answer_tokens)
        moved, same, cached = stored_passages(self._view, prompt)
        asked = logits[-len(prompt.question) :].float().cpu().numpy()
        return Stored(prompt, moved, same, cached, asked, tuple(answer))

    def blend(self, stored: Stored, ratio: float) -> Blended:
        """The prompt with `ratio` of its passages' tokens computed again."""
        prompt = stored.prompt
        found = repair(
            self._view,
            self._ids(prompt.tokens),
            stored.keys.clone(),
            stored.values.clone(),
            stored.cached,
            RepairPlan(ratio),
        )
        with torch.no_grad():
            logits = self._view.logits(found.hidden[-len(prompt.question) :])
        targets = (*prompt.question[1:], stored.answer[0])
        comparison = compare(stored.logits, logits.float().cpu().numpy(), targets)
        answer, same = greedy_like(
            self._model,
            self._all_but_last(found.keys, found.values),
            prompt.question[-1:],
            stored.answer,
            ends=self._ends,
        )
        return Blended(
            comparison, tuple(answer), same, int(stored.cached.sum()), found.repaired_tokens
        )

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(tokens), device=self._model.device)

    def _all_but_last(self, keys: torch.Tensor, values: torch.Tensor) -> DynamicCache:
        """A cache of the prompt without its last token, which is fed to begin the answer."""
        cache = DynamicCache(config=self._model.config)
        for layer in range(len(keys)):
            cache.update(keys[layer, None, :, :-1], values[layer, None, :, :-1], layer)
        return cache
