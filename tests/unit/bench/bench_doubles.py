"""Engines that answer at once with made-up times, and results to report on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvist.bench.engine import Answer, EngineError
from kvist.bench.participants import Participant
from kvist.bench.runner import SINGLE_TOKENS
from kvist.bench.samples import Kind, Machine, Phase, Result, Sample, Settings

LENGTH = 1032


def result(rounds: int = 5, lengths: Sequence[int] = (LENGTH,), flow_starts: int = 1) -> Result:
    machine = Machine("cpu", 2, 2**34, "6.1", "3.11", {"kvist": "0"}, "abc", 0.1)
    settings = Settings(
        rounds, list(lengths), "m", "bfloat16", "0", 2, 512, 4, 1, flow_starts, flow_singles=2
    )
    return Result("2026-01-01", machine, settings, complete=True)


def add(
    into: Result, phase: Phase, kind: Kind, name: str, times_s: Sequence[float], cached: int
) -> None:
    for number, took_s in enumerate(times_s):
        tokens = {
            Kind.FLOW: into.settings.flow_prompt_tokens,
            Kind.FIRST: SINGLE_TOKENS,
        }.get(kind, LENGTH)
        into.samples.append(Sample(phase, kind, name, tokens, number, took_s, cached))


class FakeEngine:
    """A cache as the benchmark sees it: `store` outlives the engine, `own` does not."""

    def __init__(self, participant: Participant, store: set[int], log: list[str]) -> None:
        self.participant, self.store, self.log = participant, store, log
        self.own: set[int] = set()
        self.fails_at: Callable[[], bool] = lambda: False
        self.tires_after_s: float | None = None
        self.ended = ""

    def wait_ready(self) -> float:
        return 1.0

    def ask(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> Answer:
        assert not self.ended
        if self.fails_at():
            raise EngineError(f"{self.participant.name} has ended: on purpose")
        self.log.append(f"{self.participant.name} {len(prompts)}x{len(prompts[0])}")
        cached = []
        for prompt in prompts:
            name = hash(tuple(prompt))
            known = name in self.own or (self.participant.cache is not None and name in self.store)
            cached.append(len(prompt) - 8 if known else 0)
            self.own.add(name)
            if self.participant.cache is not None:
                self.store.add(name)
        return Answer(0.5, tuple(cached), tuple((1,) * max_tokens for _ in prompts))

    def forget(self) -> None:
        self.own.clear()

    def rest(self, rest_s: float) -> None:
        assert rest_s < 5
        if self.tires_after_s is not None and rest_s >= self.tires_after_s:
            raise EngineError(f"{self.participant.name} has ended: asleep")

    def metric(self, name: str) -> float | None:
        return 0.1

    def stop(self) -> None:
        self.ended = "stopped"

    def kill(self) -> None:
        self.ended = self.ended or "killed"
