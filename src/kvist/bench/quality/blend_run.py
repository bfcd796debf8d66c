"""Blends prompts at several ratios; every ratio on each prompt before the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvist.bench.blend.prompts import PassagePrompt
from kvist.bench.quality.answers import exact_match, f1
from kvist.bench.quality.asking import EXAMPLES, FirstLine, passage_text, question_text
from kvist.bench.quality.blend_report import FULL
from kvist.bench.quality.blending import Blended, Blender, Stored
from kvist.bench.quality.run import CHARACTERS_PER_TOKEN, Screen, Subject, enough
from kvist.bench.quality.samples import BlendSample, SampleLog, Settings
from kvist.bench.quality.texts import Question

PASSAGES = 6
_MOST_NATS = 1e3  # in place of infinity, which JSON has not
PASSAGE_TOKENS = 192  # longer ones are cut, and the answer may be lost with the rest


def ways(ratios: Sequence[float]) -> list[str]:
    """What is measured: a full prefill, and each ratio by its spelling."""
    return [FULL, *dict.fromkeys(f"{ratio:g}" for ratio in ratios)]


class BlendRun:
    """Measures ratios. `run` may be interrupted at any time: the log has what was measured."""

    def __init__(
        self,
        subject: Subject,
        ratios: Sequence[float],
        questions: Sequence[Question],
        settings: Settings,
        log: SampleLog,
        screen: Screen,
    ) -> None:
        """Builds the prompts.

        Raises:
            ConfigError: there are fewer questions than prompts are asked for.
            UnsupportedError: the model cannot be blended.
        """
        self._subject = subject
        self._settings = settings
        self._log = log
        self._screen = screen
        self._line = FirstLine(subject.model, subject.tokenizer)
        self._blender = Blender(subject.model, self._line.ends)
        self._ways = ways(ratios)
        prompts = self._prompts(questions)
        self._asked = enough(prompts, settings.prompts, "questions")

    def steps(self) -> int:
        """Steps that `run` says."""
        return len(self._ways) * len(self._asked)

    def run(self) -> None:
        """Measures what the log does not know."""
        for number, (question, prompt, whole) in enumerate(self._asked):
            stored: Stored | None = None
            for way in self._ways:
                self._screen.step(f"blend {way}, prompt {number + 1} of {len(self._asked)}")
                if self._log.has(BlendSample, way, number):
                    continue
                if stored is None:
                    stored = self._blender.store(prompt, self._settings.greedy_tokens)
                if way == FULL:
                    sample = _full(number, stored)
                else:
                    found = self._blender.blend(stored, float(way))
                    sample = _blended(way, number, stored, found)
                answer = stored.answer if way == FULL else found.answer
                self._log.add(self._judged(sample, answer, question if whole else None))

    def _judged(
        self, sample: BlendSample, answer: Sequence[int], question: Question | None
    ) -> BlendSample:
        text = self._line.text(answer)
        if question is None:
            return msgspec.structs.replace(sample, answer=text)
        return msgspec.structs.replace(
            sample,
            answer=text,
            f1=round(f1(text, question.answers), 4),
            exact=exact_match(text, question.answers),
        )

    def _prompts(
        self, questions: Sequence[Question]
    ) -> Iterator[tuple[Question, PassagePrompt, bool]]:
        """Questions of which no passage has to be cut, for they have answers; then the others."""
        for whole in (True, False):
            for place, question in enumerate(questions):
                if not whole or self._short(question):
                    own = [self._passage(text) for text in question.passages[:PASSAGES]]
                    uncut = self._uncut(question, own)
                    if uncut == whole:
                        yield question, self._prompt(place, questions, own), uncut

    def _short(self, question: Question) -> bool:
        """Whether its passages may be uncut: seen without tokenising them."""
        most = PASSAGE_TOKENS * CHARACTERS_PER_TOKEN
        return len(question.passages) <= PASSAGES and all(len(p) < most for p in question.passages)

    def _uncut(self, question: Question, own: Sequence[Sequence[int]]) -> bool:
        return len(question.passages) == len(own) and all(len(p) <= PASSAGE_TOKENS for p in own)

    def _prompt(
        self, place: int, questions: Sequence[Question], own: list[tuple[int, ...]]
    ) -> PassagePrompt:
        """The question at `place` behind its own passages and those of the next ones."""
        for step in range(1, len(questions)):
            if len(own) >= PASSAGES:
                break
            other = questions[(place + step) % len(questions)]
            own = [*own, self._passage(other.passages[0])]
        # The order must not tell which passage is the question's own.
        turn = place % len(own)
        passages = tuple(passage[:PASSAGE_TOKENS] for passage in own[turn:] + own[:turn])
        encode = self._subject.tokenizer.encode
        asked = tuple(encode(question_text(questions[place])))
        return PassagePrompt(str(place), tuple(encode(EXAMPLES)), passages, asked)

    def _passage(self, text: str) -> tuple[int, ...]:
        return tuple(self._subject.tokenizer.encode(passage_text(text)))


def _full(number: int, stored: Stored) -> BlendSample:
    prompt = stored.prompt
    return BlendSample(
        FULL,
        number,
        tokens=len(prompt.tokens),
        cached_tokens=int(stored.cached.sum()),
        question_tokens=len(prompt.question),
        repaired_tokens=int(stored.cached.sum()),
        kl_nats=[0.0] * len(prompt.question),
        same_top=len(prompt.question),
        greedy_same_tokens=len(stored.answer),
        greedy_tokens=len(stored.answer),
    )


def _blended(way: str, number: int, stored: Stored, found: Blended) -> BlendSample:
    prompt = stored.prompt
    return BlendSample(
        way,
        number,
        tokens=len(prompt.tokens),
        cached_tokens=found.cached_tokens,
        question_tokens=len(prompt.question),
        repaired_tokens=found.repaired_tokens,
        kl_nats=[float(f"{min(value, _MOST_NATS):.4g}") for value in found.comparison.kl_nats],
        same_top=int(found.comparison.same_top.sum()),
        greedy_same_tokens=found.same_tokens,
        greedy_tokens=len(stored.answer),
    )
