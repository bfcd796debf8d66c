"""Plays the same stream under every policy, round by round, on replicas that live through all."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvist.bench.gateway.processes import Process, gateway
from kvist.bench.machine import describe_machine, load
from kvist.bench.prompts import alternating
from kvist.bench.routing.play import Answer, answers, logged, play
from kvist.bench.routing.stream import Kind, Mix, Session, Turn, make_stream
from kvist.bench.routing.texts import Texts
from kvist.bench.samples import Machine, after

POLICIES = ("kvist", "round-robin", "least-loaded", "dynamo")
_TRIALS = 3  # of each replica, to learn what a prompt costs that nobody has
_PATIENCE_S = 900.0
# Replicas that share cores answer late.
_WAITS = {"first_token_s": _PATIENCE_S, "token_s": _PATIENCE_S, "health_s": 60.0}


class Settings(msgspec.Struct, frozen=True):
    """What is asked of a run.

    Attributes:
        load_ratio: requests a second, over what the replicas could serve if nothing were cached.
        sessions, turns, questions, documents, prompt_chars: see `Mix`.
        answer_tokens: of each answer.
        kv_tokens: that each replica's cache holds.
        block_tokens: of its pages, and of the router's keys.
    """

    replicas: int = 2
    rounds: int = 4
    policies: tuple[str, ...] = POLICIES
    load_ratio: float = 1.0
    sessions: int = 12
    turns: int = 6
    questions: int = 48
    documents: int = 8
    prompt_chars: int = 9000
    answer_tokens: int = 8
    kv_tokens: int = 16_384
    block_tokens: int = 32
    seed: int = 7

    @property
    def mix(self) -> Mix:
        """What the stream is made of."""
        return Mix(self.sessions, self.turns, self.questions, self.documents, self.prompt_chars)


class Play(msgspec.Struct, frozen=True):
    """The stream once, under one policy."""

    round: int
    policy: str
    answers: list[Answer]


class Outcomes(msgspec.Struct):
    """All of a run.

    Attributes:
        texts: where prompts come from.
        engine: what the replicas are.
        cold_s: time to the first token of a prompt that nobody has, of the usual length.
        tokens_per_s: prompt tokens a second of such prompts.
    """

    machine: Machine
    settings: Settings
    texts: str
    engine: str
    cold_s: float = 0.0
    tokens_per_s: float = 0.0
    plays: list[Play] = []
    schema: int = 1

    @property
    def request_s(self) -> float:
        """Seconds between two requests."""
        return self.cold_s / (self.settings.replicas * self.settings.load_ratio)


def measure(
    settings: Settings, texts: Texts, urls: Sequence[str], folder: Path,
    tell: Callable[[str], None], *,
    model: str, engine: str, options: Sequence[str] = (),
) -> Outcomes:  # fmt: skip
    """Plays all rounds; `tell` gets a line now and then.

    Args:
        texts: what prompts are made of.
        urls: of the replicas.
        folder: gets the gateways' logs.
        model: as the replicas call it.
        engine: what they are, for the record.
        options: of every gateway besides those that are compared.

    Raises:
        BenchError: a gateway did not start, or a request was not served by one replica.
    """
    found = Outcomes(describe_machine(), settings, texts.name, engine)
    bench = _Bench(found, urls, folder, model, options)
    bench.calibrate(make_stream(texts, settings.mix, settings.seed))
    tell(f"a prompt that nobody has: {found.cold_s:.2f} s; a request each {found.request_s:.2f} s")
    for number in range(settings.rounds):
        stream = make_stream(texts, settings.mix, settings.seed + number)
        for policy in alternating(settings.policies, number):
            served = bench.play(stream, f"r{number}-{policy}", policy)
            found.plays.append(Play(number, policy, served))
            mean_s = statistics.fmean(answer.ttft_s for answer in served)
            tell(f"round {number + 1} of {settings.rounds}, {policy}: mean TTFT {mean_s:.2f} s")
    found.machine = after(found.machine, load())
    return found


class _Bench:
    """The replicas of one run, and gateways before them one after the other."""

    def __init__(
        self, found: Outcomes, urls: Sequence[str], folder: Path, model: str, options: Sequence[str]
    ) -> None:
        self._found, self._urls, self._folder = found, urls, folder
        self._model, self._options = model, options

    def calibrate(self, stream: Sequence[Session]) -> None:
        """Learns what a prompt of the usual length costs: the load is made by it.

        It is also what every policy is told that a replica can do.
        """
        prompts = sorted((t.prompt for s in stream for t in s.turns), key=len)
        usual, count = prompts[len(prompts) // 2], _TRIALS * len(self._urls)
        turns = tuple(Turn(0.0, f"Trial {n}.\n{usual}") for n in range(count))
        trials = self.play([Session(Kind.RAG, turns)], "trial", "round-robin")
        self._found.cold_s = statistics.median(a.ttft_s for a in trials)
        self._found.tokens_per_s = statistics.median(
            max(1, a.prompt_tokens) / a.ttft_s for a in trials
        )

    def play(self, stream: Sequence[Session], salt: str, policy: str) -> list[Answer]:
        """One play, through a gateway of its own that knows nothing of those before."""
        log = self._folder / f"{salt}.log"
        with gateway(self._urls, *self._knobs(policy), log=log) as front:
            return asyncio.run(self._answers(front, stream, salt, log))

    async def _answers(
        self, front: Process, stream: Sequence[Session], salt: str, log: Path
    ) -> list[Answer]:
        sent = await play(
            front.port, stream,
            model=self._model, salt=salt, request_s=self._found.request_s,
            tokens=self._found.settings.answer_tokens,
        )  # fmt: skip
        return answers(sent, await logged(log, [one.name for one in sent]), self._urls)

    def _knobs(self, policy: str) -> list[str]:
        """What every policy gets alike: nothing is refused, and nobody waits at the gateway."""
        settings = self._found.settings
        knobs = {
            "block_tokens": settings.block_tokens,
            "router.policy": policy,
            "router.admission": "none",
            "router.hold_s": _PATIENCE_S,
            "router.kv_tokens": settings.kv_tokens,
            **{f"gateway.timeouts.{name}": seconds for name, seconds in _WAITS.items()},
        }
        if self._found.tokens_per_s:
            knobs["router.prefill_tokens_per_s"] = self._found.tokens_per_s
        return [*(f"--set={name}={value}" for name, value in knobs.items()), *self._options]
