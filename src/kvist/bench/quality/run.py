"""One run: contexts, then questions; every codec on each before the next.

So that an interrupted run compares its codecs on the same texts, and only one text's KV is in
memory. What the log knows already is not measured again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from kvist.bench.quality.answers import exact_match, f1
from kvist.bench.quality.asking import MAX_PROMPT_TOKENS, Asked, Asker
from kvist.bench.quality.codecs import through
from kvist.bench.quality.divergence import Context, diverge, prepare
from kvist.bench.quality.forward import kv_layout
from kvist.bench.quality.samples import AnswerSample, CodecSample, SampleLog, Settings
from kvist.bench.quality.texts import Document, Question, Texts
from kvist.codec.payload import BlockCodec
from kvist.core.errors import ConfigError, KvistError
from kvist.core.layout import BlockLayout

_T = TypeVar("_T")

_CHARACTERS_PER_TOKEN = 12  # at most, of any text: bounds what is tokenised of a long document


class Screen(Protocol):
    """Where a run says how far it is."""

    def expect(self, steps: int) -> None:
        """How many steps there will be."""

    def step(self, text: str) -> None:
        """A step is about to be made."""

    def say(self, text: str) -> None:
        """A line that stays."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in float32 with its tokenizer, and the layout of its KV."""

    model: Any
    tokenizer: Any
    layout: BlockLayout


def subject_of(model: Any, tokenizer: Any, block_tokens: int) -> Subject:
    """Binds a model to blocks of `block_tokens`.

    Raises:
        UnsupportedError: the model's KV is not one K and V a layer.
    """
    return Subject(model, tokenizer, kv_layout(model, block_tokens))


class CodecRun:
    """Measures codecs. `run` may be interrupted at any time: the log has what was measured."""

    def __init__(
        self,
        subject: Subject,
        codecs: Sequence[BlockCodec],
        texts: Texts,
        settings: Settings,
        log: SampleLog,
        screen: Screen,
    ) -> None:
        """Cuts the texts.

        Raises:
            ConfigError: there are fewer texts, or questions, of enough tokens than are asked for.
        """
        self._subject = subject
        self._codecs = codecs
        self._settings = settings
        self._log = log
        self._screen = screen
        self._warm = set[str]()
        self._asker = Asker(
            subject.model,
            subject.tokenizer,
            subject.layout,
            answer_tokens=settings.answer_tokens,
        )
        self._windows = enough(
            self._cut(texts.documents), settings.contexts, f"texts of {self._need} tokens"
        )
        self._prompts = enough(
            self._asked(texts.questions), settings.questions, "questions with short passages"
        )

    @property
    def _need(self) -> int:
        return self._settings.context_tokens + self._settings.follow_tokens + 1

    def steps(self) -> int:
        """Steps that `run` says."""
        return len(self._codecs) * (len(self._windows) + len(self._prompts))

    def run(self) -> None:
        """Measures what the log does not know."""
        for number, window in enumerate(self._windows):
            self._context(number, window)
        for number, (question, prompt) in enumerate(self._prompts):
            self._question(number, question, prompt)

    def _context(self, number: int, window: Sequence[int]) -> None:
        context: Context | None = None
        for codec in self._codecs:
            self._screen.step(f"{codec.name}, text {number + 1} of {len(self._windows)}")
            if self._log.has(CodecSample, codec.name, number):
                continue
            if context is None:
                settings = self._settings
                context = prepare(
                    self._subject.model,
                    window,
                    self._subject.layout,
                    follow_tokens=settings.follow_tokens,
                    greedy_tokens=settings.greedy_tokens,
                )
            if codec.name not in self._warm:  # what is loaded at the first call is not its speed
                self._warm.add(codec.name)
                _tried(codec, context)
            self._log.add(_measured(codec, number, context))

    def _question(self, number: int, question: Question, prompt: Sequence[int]) -> None:
        asked: Asked | None = None
        for codec in self._codecs:
            self._screen.step(f"{codec.name}, question {number + 1} of {len(self._prompts)}")
            if self._log.has(AnswerSample, codec.name, number):
                continue
            asked = asked or self._asker.ask(question, prompt)
            try:
                blocks = through(codec, asked.blocks).blocks
            except KvistError:  # its row says so already, of the contexts
                continue
            answer = self._asker.answer(asked, blocks)
            self._log.add(
                AnswerSample(
                    codec.name,
                    number,
                    answer,
                    round(f1(answer, question.answers), 4),
                    exact_match(answer, question.answers),
                )
            )

    def _cut(self, documents: Sequence[Document]) -> Iterator[list[int]]:
        limit = self._need * _CHARACTERS_PER_TOKEN
        for document in documents:
            text = document.text[-limit:] if document.from_end else document.text[:limit]
            tokens = list(self._subject.tokenizer.encode(text))
            if len(tokens) >= self._need:
                yield tokens[-self._need :] if document.from_end else tokens[: self._need]

    def _asked(self, questions: Sequence[Question]) -> Iterator[tuple[Question, list[int]]]:
        for question in questions:
            if sum(map(len, question.passages)) > MAX_PROMPT_TOKENS * _CHARACTERS_PER_TOKEN:
                continue  # long before it is tokenised
            prompt = self._asker.prompt(question)
            if self._settings.block_tokens < len(prompt) <= MAX_PROMPT_TOKENS:
                yield question, prompt


def enough(found: Iterator[_T], count: int, what: str) -> list[_T]:
    """The first `count` of what there is; no more is made.

    Raises:
        ConfigError: there are fewer.
    """
    taken = [one for _, one in zip(range(count), found, strict=False)]
    if len(taken) < count:
        raise ConfigError(f"there are {len(taken)} {what}, not {count}", path="--texts")
    return taken


def _tried(codec: BlockCodec, context: Context) -> None:
    with suppress(KvistError):  # it is measured next, and then says so
        through(codec, context.blocks[:1])


def _measured(codec: BlockCodec, number: int, context: Context) -> CodecSample:
    raw_bytes = sum(map(len, context.blocks))
    try:
        coded = through(codec, context.blocks)
    except KvistError as error:
        return CodecSample(codec.name, number, raw_bytes, 0, 0, 0, 0, fault=str(error))
    sample = CodecSample(
        codec.name,
        number,
        raw_bytes,
        coded.stored_bytes,
        round(coded.encode_s, 6),
        round(coded.decode_s, 6),
        round(coded.copy_s, 6),
    )
    found = diverge(context, coded.blocks)
    if not np.isfinite(found.kl_nats).all():
        return msgspec.structs.replace(sample, fault="what it decodes to makes no prediction")
    return msgspec.structs.replace(
        sample,
        kl_nats=[float(f"{v:.4g}") for v in found.kl_nats],
        surprise_nats=[float(f"{v:.5g}") for v in found.surprise_nats],
        same_top=int(found.same_top.sum()),
        greedy_same_tokens=found.greedy_same_tokens,
        greedy_tokens=found.greedy_tokens,
    )
