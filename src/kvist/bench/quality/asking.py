"""Asks a model questions whose passages' KV was changed, and reads its short answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from kvist.bench.quality.forward import (
    cache_of,
    compute_blocks,
    greedy_after,
    greedy_like,
)
from kvist.bench.quality.texts import Question
from kvist.core.layout import BlockLayout

MAX_PROMPT_TOKENS = 2048

# Shown before every question, so that even a small model answers in a few words.
EXAMPLES = """\
Passage: The common swift spends almost its whole life in the air. It drinks, mates and sleeps on \
the wing and lands only to nest, under the eaves of old buildings or in hollow trees. Young birds \
leave the nest about six weeks after they hatch and may not touch the ground again for two years.
Question: Where does the common swift sleep?
Answer: on the wing

Passage: Porcelain is fired at about 1,300 degrees, far hotter than earthenware. In Europe nobody \
knew how it was made until Johann Friedrich Böttger, who was held prisoner to make gold, found the \
right clay in 1708. Two years later a factory opened in Meissen, where it still works.
Question: Who found out in Europe how porcelain is made?
Answer: Johann Friedrich Böttger

Passage: The tide in the Bay of Fundy rises by as much as 16 metres, the height of a house of five \
floors. Twice a day more water flows into the bay than leaves all the rivers of the world. At low \
tide visitors walk on the sea floor among rocks shaped like flower pots.
Question: How high does the tide in the Bay of Fundy rise?
Answer: 16 metres

"""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as tokens: blocks of KV, the tokens after them, and the answer from raw KV."""

    question: Question
    blocks: tuple[bytes, ...]
    tail: tuple[int, ...]
    raw_answer: tuple[int, ...]


class FirstLine:
    """Reads a model's answer: up to the end of its line, or where the model ends it."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bool] = {}
        ends = getattr(model.generation_config, "eos_token_id", None)
        self._stops = {ends} if isinstance(ends, int) else set(ends or ())

    def ends(self, token: int) -> bool:
        """Whether an answer is over with this token."""
        if token not in self._known:
            line = "\n" in str(self._tokenizer.decode([token]))
            self._known[token] = line or token in self._stops
        return self._known[token]

    def text(self, answer: Sequence[int]) -> str:
        """The words before the end."""
        line = [*takewhile(lambda token: not self.ends(token), answer)]
        return str(self._tokenizer.decode(line, skip_special_tokens=True)).strip()


class Asker:
    """Asks one model; keeps nothing of a question."""

    def __init__(
        self, model: Any, tokenizer: Any, layout: BlockLayout, *, answer_tokens: int
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._layout = layout
        self._answer_tokens = answer_tokens
        self._line = FirstLine(model, tokenizer)

    def prompt(self, question: Question) -> list[int]:
        """Tokens of examples, the question's passages, and the question."""
        passages = "".join(map(passage_text, question.passages))
        return list(self._tokenizer.encode(EXAMPLES + passages + question_text(question)))

    def ask(self, question: Question, prompt: Sequence[int]) -> Asked:
        """Computes the KV of a prompt's whole blocks and the answer from it.

        Raises:
            ValueError: it has no whole block and a token after it.
        """
        held = (len(prompt) - 1) // self._layout.block_tokens * self._layout.block_tokens
        if not held:
            raise ValueError(f"{len(prompt)} tokens are no block and a token")
        blocks = compute_blocks(self._model, prompt[:held], self._layout)
        tail = tuple(prompt[held:])
        cache = cache_of(self._model, blocks, self._layout)
        answer = greedy_after(self._model, cache, tail, self._answer_tokens, ends=self._line.ends)
        return Asked(question, blocks, tail, tuple(answer))

    def answer(self, asked: Asked, blocks: Sequence[bytes]) -> str:
        """The answer from `blocks` in place of the prompt's own."""
        cache = cache_of(self._model, blocks, self._layout)
        answer, _ = greedy_like(
            self._model, cache, asked.tail, asked.raw_answer, ends=self._line.ends
        )
        return self._line.text(answer)


def passage_text(passage: str) -> str:
    """A passage as it stands in a prompt."""
    return f"Passage: {passage}\n"


def question_text(question: Question) -> str:
    """A question as it stands at the end of a prompt."""
    return f"Question: {question.question.rstrip('? ')}?\nAnswer:"
