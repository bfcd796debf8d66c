"""The bench of blend in vLLM: what it asks of engines, and what it makes of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvist.bench.blend.engine import (
    BLEND,
    ENGINES,
    BlendRun,
    BlendSample,
    _round,
    build_parser,
    table,
)
from kvist.bench.blend.prompts import PassagePrompt
from kvist.bench.engine import Answer
from kvist.bench.machine import describe_machine
from kvist.bench.participants import KVIST, VLLM

PROMPT = PassagePrompt(
    "p", (1, 2), tuple((10 * i, 10 * i + 1, 10 * i + 2) for i in range(1, 6)), (7,)
)


class FakeEngine:
    """Remembers what it was asked."""

    def __init__(self, name: str, said: list[tuple[str, str, Any]]) -> None:
        self._name, self._said = name, said

    def ask(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> Answer:
        self._said.append((self._name, "ask", (list(prompts[0]), max_tokens)))
        return Answer(0.5, (4,), (tuple(range(max_tokens)),))

    def forget(self) -> None:
        self._said.append((self._name, "forget", None))

    def rest(self, rest_s: float) -> None:
        pass


def run() -> BlendRun:
    return BlendRun(describe_machine(), "bfloat16", "gazetteer", 0.15, 5, 3)


def served(rounds: int) -> tuple[BlendRun, list[tuple[str, str, Any]]]:
    result, said = run(), list[tuple[str, str, Any]]()
    engines: Any = {name: FakeEngine(name, said) for name in ENGINES}
    for number in range(rounds):
        _round(result, engines, PROMPT, number, 3)
    return result, said


def test_each_engine_gets_the_passages_once_before_and_then_in_another_order() -> None:
    _, said = served(1)
    asked = [what for name, op, what in said if name == BLEND and op == "ask"]
    (earlier, _), (first, one), (again, three) = asked
    assert earlier == PROMPT.tokens
    assert first == again
    assert (one, three) == (1, 3)
    assert sorted(first) == sorted(earlier)
    assert first != earlier
    assert first[:5] != earlier[:5]  # not even the first passage is where it was


def test_its_own_prefix_cache_is_emptied_before_every_prompt() -> None:
    _, said = served(1)
    ops = [op for name, op, _ in said if name == VLLM]
    assert ops == ["ask", "forget"] * 3


def test_who_goes_first_changes_and_the_first_round_does_not_count() -> None:
    result, said = served(4)
    first = [said[i * len(said) // 4][0] for i in range(4)]
    assert set(first) == set(ENGINES)
    assert [s.round for s in result.of(KVIST)] == [1, 2, 3]


def sample(engine: str, ttft_s: float, answer: list[int], number: int = 1) -> BlendSample:
    return BlendSample(number, engine, 100, 10, ttft_s, answer)


def test_answers_are_compared_up_to_the_first_difference() -> None:
    result = run()
    result.samples = [
        sample(VLLM, 2.0, [1, 2, 3, 4]),
        sample(KVIST, 1.0, [1, 2, 3, 4]),
        sample(BLEND, 0.5, [1, 2, 9, 4]),
        sample(VLLM, 4.0, [1, 2, 3, 4], 2),
        sample(KVIST, 2.0, [1, 2, 3, 4], 2),
        sample(BLEND, 1.0, [5, 2, 3, 4], 2),
    ]
    assert result.agreement_ratio(KVIST) == 1.0
    assert result.agreement_ratio(BLEND) == pytest.approx(0.25)
    assert result.first_tokens(BLEND) == 1
    text = table(result)
    assert "4.00x" in text
    assert "1/2" in text


def test_ratio_is_that_of_the_configuration() -> None:
    assert build_parser().parse_args([]).ratio == 0.15
