"""Asks a model questions whose passages' KV was changed, and reads its short answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvist.bench.quality.forward import (
    cache_of,
    compute_blocks,
    greedy_after,
    logits_after,
)
from kvist.bench.quality.measures import agreed_tokens
from kvist.bench.quality.texts import Question
from kvist.core.layout import BlockLayout

MAX_PROMPT_TOKENS = 2048

# Shown before every question, so that even a small model answers in a few words.
_EXAMPLES = """\
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


class Asker:
    """Asks one model; keeps nothing of a question."""

    def __init__(
        self, model: Any, tokenizer: Any, layout: BlockLayout, *, answer_tokens: int
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._layout = layout
        self._answer_tokens = answer_tokens
        self._endings: dict[int, bool] = {}
        ends = getattr(model.generation_config, "eos_token_id", None)
        self._stops = {ends} if isinstance(ends, int) else set(ends or ())

    def prompt(self, question: Question) -> list[int]:
        """Tokens of examples, the question's passages, and the question."""
        text = "".join(f"Passage: {passage}\n" for passage in question.passages)
        asked = question.question.rstrip("? ") + "?"
        return list(self._tokenizer.encode(f"{_EXAMPLES}{text}Question: {asked}\nAnswer:"))

    def ask(self, question: Question, prompt: Sequence[int]) -> Asked | None:
        """Computes the prompt's KV and the answer from it; `None` if it fills no block."""
        held = (len(prompt) - 1) // self._layout.block_tokens * self._layout.block_tokens
        if not held:
            return None
        blocks = compute_blocks(self._model, prompt[:held], self._layout)
        tail = tuple(prompt[held:])
        cache = cache_of(self._model, blocks, self._layout)
        answer = greedy_after(self._model, cache, tail, self._answer_tokens, ends=self._ends)
        return Asked(question, blocks, tail, tuple(answer))

    def answer(self, asked: Asked, blocks: Sequence[bytes]) -> str:
        """The answer from `blocks` in place of the prompt's own.

        One pass over the raw answer finds where this one parts from it; only what follows has to be
        decoded token by token.
        """
        cache = cache_of(self._model, blocks, self._layout)
        fed = [*asked.tail, *asked.raw_answer[:-1]]
        found = logits_after(self._model, cache, fed)[len(asked.tail) - 1 :].argmax(axis=1).tolist()
        same = agreed_tokens(asked.raw_answer, found)
        if same == len(asked.raw_answer):
            return self.text(asked.raw_answer)
        answer = [*asked.raw_answer[:same], found[same]]
        if not self._ends(answer[-1]):
            answer += greedy_after(
                self._model,
                cache,
                [*asked.tail, *answer],
                self._answer_tokens - len(answer),
                ends=self._ends,
            )
        return self.text(answer)

    def text(self, answer: Sequence[int]) -> str:
        """An answer's first line."""
        whole = str(self._tokenizer.decode(list(answer), skip_special_tokens=True)).strip()
        return whole.splitlines()[0].strip() if whole else ""

    def _ends(self, token: int) -> bool:
        if token not in self._endings:
            line = "\n" in str(self._tokenizer.decode([token]))
            self._endings[token] = line or token in self._stops
        return self._endings[token]
