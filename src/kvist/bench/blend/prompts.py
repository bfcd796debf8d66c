"""Prompts of several passages and a question, each passage of which was cached alone."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvist.bench.document import Tokenizer, long_document, questions
from kvist.core.errors import ConfigError

_INTRO = "<|im_start|>user\nAnswer the question from these passages, in a few words.\n"
_PASSAGE = "\nPassage: "
_QUESTION = "\nQuestion: "
_ANSWER = "<|im_end|>\n<|im_start|>assistant\nThe answer is"
_SEED = 1505


@dataclass(frozen=True, slots=True)
class PassagePrompt:
    """Token ids: an introduction, passages, and a question. `name` is the same in every run."""

    name: str
    intro: tuple[int, ...]
    passages: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        """The whole prompt."""
        body = [t for passage in self.passages for t in passage]
        return [*self.intro, *body, *self.question]

    def spans(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of each passage in the prompt."""
        at = len(self.intro)
        for passage in self.passages:
            yield at, at + len(passage)
            at += len(passage)


def passage_prompts(
    tokenizer: Tokenizer,
    *,
    count: int,
    passages: int,
    passage_tokens: int,
    texts: Path | None = None,
) -> list[PassagePrompt]:
    """`count` prompts of `passages` passages of at most `passage_tokens` tokens.

    Args:
        tokenizer: the model's.
        count: prompts.
        passages: in each.
        passage_tokens: longer ones are cut.
        texts: a `.json.gz` or `.jsonl.gz` of `{"question", "ctxs": [{"text"}]}`, as the data sets
            for retrieval are shared; without it, passages of the gazetteer in `document.py`.

    Raises:
        ConfigError: the file is not of this kind, or holds too little.
    """
    rows = _rows_of(texts, passages) if texts else _made_up(tokenizer, passages, passage_tokens)
    found = []
    for number, (question, bodies) in enumerate(rows):
        if number == count:
            break
        cut = tuple(
            tuple(tokenizer.encode(_PASSAGE + body))[:passage_tokens] for body in bodies[:passages]
        )
        asks = tuple(tokenizer.encode(_QUESTION + question + _ANSWER))
        name = f"{texts.name if texts else 'gazetteer'}:{number}:{passages}x{passage_tokens}"
        found.append(PassagePrompt(name, tuple(tokenizer.encode(_INTRO)), cut, asks))
    if len(found) < count:
        raise ConfigError(f"{len(found)} prompts, not {count}", path=str(texts or "gazetteer"))
    return found


def _rows_of(path: Path, passages: int) -> Iterator[tuple[str, Sequence[str]]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            if path.name.endswith(".jsonl.gz"):
                rows: list[Any] = [json.loads(line) for line in file]
            else:
                rows = json.load(file)
        usable = [row for row in rows if len(row["ctxs"]) >= passages]
        yield from ((row["question"], [c["text"] for c in row["ctxs"]]) for row in usable)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"no file of questions and passages: {e}", path=str(path)) from e


def _made_up(
    tokenizer: Tokenizer, passages: int, passage_tokens: int
) -> Iterator[tuple[str, Sequence[str]]]:
    """Entries of the gazetteer in ever new order; those that are asked about are among them."""
    pool_size = max(40, 4 * passages)
    entries = long_document(200 * pool_size, tokenizer).split("\n\n")[1:]
    joined = max(1, passage_tokens // 150)  # an entry has some 150 tokens or more
    pool = ["\n\n".join(entries[i : i + joined]) for i in range(0, len(entries) - joined, joined)]
    rng = random.Random(_SEED)
    while True:
        yield rng.choice(questions()), rng.sample(pool, passages)
