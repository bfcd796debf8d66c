"""Runs the benchmark: the same prompts through engines that live side by side.

1. FLOW: the engine alone and the one with Kvist serve batches that nobody has seen, in turn; then
   both are started anew and do it again: two processes of the very same engine differ in speed.
2. FILL: every engine computes prompts that nobody has seen, in turn; caches save them.
3. REUSE: in every round all engines are stopped and new processes start on what the old ones left.
   The engine alone computes a new prompt and repeats it (recompute, and its own prefix cache), and
   every cache gets the prompt of FILL: after the restart, again (own prefix cache), and again with
   an empty prefix cache (the cache's memory).
4. DISK: engines that keep files are restarted once more, with nothing brought to memory ahead, the
   kernel is made to drop the files' pages as a reboot would, and the prompts of FILL are asked for
   again.
5. HARM: Kvist over a disk that is slower than computing, once deciding by what it has learned and
   once loading whatever it has, beside the engine alone. Prompts of many lengths before that let it
   learn, and show how well it predicts.

Only one engine computes at any time, and whatever is compared was measured in the same round. An
engine that fails is left out from then on; the reason is kept.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from kvist.bench.engine import Answer, Engine, EngineError
from kvist.bench.participants import (
    KVIST,
    MAX_MODEL_TOKENS,
    SLOW_PLANNED,
    VLLM,
    Participant,
    engine_environment,
    engine_settings,
)
from kvist.bench.prompts import alternating, prompt
from kvist.bench.samples import Kind, Phase, Result, Sample

SAVING, FLOW, REUSE, DISK, HARM = "saving", "flow", "reuse", "disk", "harm"
PARTS = (SAVING, FLOW, REUSE, DISK, HARM)

_WARM_TOKENS = 600
_REST_S = 1.0
_REST_LONGEST_S = 2.0  # after a prompt that fills the engine; saves of shorter ones end sooner
_REST_BEFORE_STOP_S = 2.0
HARM_TOKENS = 2056
SINGLE_TOKENS = 1032  # of one prompt where nothing ever hits
_LEARNING_PASSES = 50
_LEARNING_TOKENS = 1024  # the longest prompt to learn from
_GAUGES_S = 1.5  # until what was learned is on the metrics page


class Screen(Protocol):
    """Where progress is shown."""

    def say(self, text: str) -> None:
        """A line that stays."""
        ...

    def step(self, text: str) -> None:
        """One request is about to be measured."""
        ...


class EngineLike(Protocol):
    """What the runner asks of an engine; see `Engine`."""

    def wait_ready(self) -> float: ...
    def ask(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> Answer: ...
    def forget(self) -> None: ...
    def rest(self, rest_s: float) -> None: ...
    def metric(self, name: str) -> float | None: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...


Start = Callable[[Participant], EngineLike]


def process_starter(result: Result, model: Path, work: Path) -> Start:
    """Starts engines as processes that keep their logs in `work`."""
    env = engine_environment(result.settings.engine_cores)

    def start(participant: Participant) -> EngineLike:
        return Engine.start(
            participant.name,
            engine_settings(model, participant),
            folder=work,
            env=env,
            python=participant.python,
        )

    return start


class Runner:
    """One run. Adds to `result` as it goes, so that an interrupted run keeps what it has."""

    def __init__(
        self,
        result: Result,
        participants: Sequence[Participant],
        parts: Sequence[str],
        start: Start,
        screen: Screen,
    ) -> None:
        self._result, self._parts, self._start, self._screen = result, parts, start, screen
        self._participants = {p.name: p for p in participants}
        self._main = [p.name for p in participants if not p.slow_disk]
        self._slow = [p.name for p in participants if p.slow_disk]
        self._caches = [p.name for p in participants if p.cache is not None and not p.slow_disk]
        self._engines: dict[str, EngineLike] = {}
        self._starts = 0

    def steps(self) -> int:
        """Requests that a run without failures measures."""
        wanted, each = self._result.settings, 0
        if self._fills():
            each += len(self._fillers())
        if REUSE in self._parts:
            each += 2 + sum(3 if p.has_memory else 2 for p in self._of(self._caches))
        if DISK in self._parts:
            each += len(self._keep_files())
        each_round = 2 * (1 + wanted.flow_singles)
        flow = each_round * wanted.flow_starts * (wanted.batches_per_start() + 1)
        flow = flow if FLOW in self._parts else 0
        harm = 0
        if self._harms():
            harm = (1 + 2 * len(self._slow)) * wanted.rounds + _LEARNING_PASSES
        return each * wanted.rounds * len(wanted.lengths_tokens) + flow + harm

    def run(self) -> None:
        """Runs the parts asked for. Whatever happens, no engine is left behind."""
        try:
            if FLOW in self._parts:
                self._flow()
            if self._fills():
                self._open(self._main)
                self._fill()
            if REUSE in self._parts:
                self._reuse()
            if DISK in self._parts:
                self._restart(self._keep_files(), from_disk=True)
                self._disk()
            if self._harms():
                self._close(list(self._engines), gently=True)
                self._open([VLLM, *self._slow])
                self._harm()
        finally:
            self._close(list(self._engines), gently=False)

    def _fills(self) -> bool:
        return any(part in self._parts for part in (SAVING, REUSE, DISK))

    def _harms(self) -> bool:
        return HARM in self._parts and bool(self._slow)

    def _keep_files(self) -> list[str]:
        return [name for name in self._caches if self._participants[name].folder is not None]

    def _fillers(self) -> list[str]:
        return [VLLM, *self._caches] if SAVING in self._parts else list(self._caches)

    def _of(self, names: Sequence[str]) -> list[Participant]:
        return [self._participants[name] for name in names]

    # -- the phases -------------------------------------------------------------------------

    def _fill(self) -> None:
        self._screen.say("computing the prompts, and saving them")
        for tokens, number in self._rounds():
            for name in alternating(self._fillers(), number):
                if self._once(Phase.FILL, Kind.COLD, name, number, self._saved(tokens, number)):
                    self._rest(name, tokens)

    def _flow(self) -> None:
        wanted = self._result.settings
        for start in range(wanted.flow_starts):
            self._open(alternating([VLLM, KVIST], start))
            self._screen.say("serving batches in which nothing is reused")
            for number in range(-1, wanted.batches_per_start()):  # the first one warms up
                self._flow_round(start, number)
            self._close(list(self._engines), gently=True)

    def _flow_round(self, start: int, number: int) -> None:
        wanted = self._result.settings
        prompts = [
            prompt(wanted.flow_prompt_tokens, wanted.seed, "flow", start, number, i)
            for i in range(wanted.flow_prompts)
        ]
        for name in alternating([VLLM, KVIST], number):
            self._screen.step(f"batch of {len(prompts)}, {name}")
            answer = self._ask(name, prompts, wanted.flow_output_tokens)
            if answer is not None and number >= 0:
                tokens = wanted.flow_prompt_tokens
                place = start * wanted.batches_per_start() + number
                self._keep(Phase.FLOW, Kind.FLOW, name, place, tokens, answer)
        for i in range(wanted.flow_singles):
            single = prompt(SINGLE_TOKENS, wanted.seed, "single", start, number, i)
            for name in alternating([VLLM, KVIST], number + i):
                self._screen.step(f"a single prompt, {name}")
                answer = self._ask(name, [single], 1)
                if answer is not None and number >= 0:
                    place = (start * wanted.batches_per_start() + number) * wanted.flow_singles + i
                    self._keep(Phase.FLOW, Kind.FIRST, name, place, SINGLE_TOKENS, answer)

    def _restart(self, names: Sequence[str], *, from_disk: bool = False) -> None:
        alive = [name for name in names if name in self._engines]
        self._screen.say(f"stopping engines: {', '.join(alive)}")
        for name in alive:
            self._guarded(name, lambda e: e.rest(_REST_BEFORE_STOP_S))
        alive = [name for name in alive if name in self._engines]  # one may have failed now
        self._close(alive, gently=True)
        for participant in self._of(alive):
            if from_disk and participant.folder is not None:
                drop_from_page_cache(participant.folder)
        self._open(alive, from_disk=from_disk)

    def _reuse(self) -> None:
        wanted = self._result.settings
        for number in range(wanted.rounds):
            self._restart(self._main)
            self._screen.say("asking for the saved prompts, and for new ones")
            for tokens in wanted.lengths_tokens:
                self._reuse_round(tokens, number)

    def _reuse_round(self, tokens: int, number: int) -> None:
        fresh = prompt(tokens, self._result.settings.seed, "fresh", tokens, number)
        self._once(Phase.REUSE, Kind.COLD, VLLM, number, fresh)
        self._once(Phase.REUSE, Kind.REPEAT, VLLM, number, fresh)
        for participant in self._of(alternating(self._caches, number)):
            name, saved = participant.name, self._saved(tokens, number)
            self._once(Phase.REUSE, Kind.RESTART, name, number, saved)
            self._once(Phase.REUSE, Kind.REPEAT, name, number, saved)
            if participant.has_memory:
                self._guarded(name, lambda e: e.forget())
                self._once(Phase.REUSE, Kind.MEMORY, name, number, saved)

    def _disk(self) -> None:
        self._screen.say("asking for the saved prompts, from the disk")
        for tokens, number in self._rounds():
            for name in alternating(self._keep_files(), number):
                self._once(Phase.DISK, Kind.DISK, name, number, self._saved(tokens, number))

    def _harm(self) -> None:
        self._screen.say("learning, and computing prompts that a slow disk will have")
        self._learn()
        seed, rounds = self._result.settings.seed, range(self._result.settings.rounds)
        saved = [prompt(HARM_TOKENS, seed, "slow", number) for number in rounds]
        for number in rounds:
            for name in alternating(self._slow, number):
                if self._once(Phase.FILL, Kind.COLD, name, number, saved[number]):
                    self._rest(name, HARM_TOKENS)
        self._screen.say("asking for them")
        for number in rounds:
            for name in alternating([VLLM, *self._slow], number):
                if name == VLLM:
                    fresh = prompt(HARM_TOKENS, seed, "not saved", number)
                    self._once(Phase.HARM, Kind.COLD, name, number, fresh)
                else:
                    self._guarded(name, lambda e: e.forget())
                    self._once(Phase.HARM, Kind.SLOW, name, number, saved[number])

    def _learn(self) -> None:
        """Prompts of many lengths through the engine that plans, and how well it predicts them."""
        lengths = random.Random(self._result.settings.seed)
        for i in range(_LEARNING_PASSES):
            tokens = lengths.randrange(64, _LEARNING_TOKENS)
            self._screen.step(f"learning, {i + 1} of {_LEARNING_PASSES}")
            self._ask(SLOW_PLANNED, [prompt(tokens, "learn", i)], 1)

        def ask(engine: EngineLike) -> None:
            engine.rest(_GAUGES_S)
            engine.ask([prompt(64, "learn", "last")], max_tokens=4)
            self._result.prefill_error_ratio = engine.metric("kvist_prefill_error_ratio")

        self._guarded(SLOW_PLANNED, ask)

    def _rounds(self) -> list[tuple[int, int]]:
        wanted = self._result.settings
        return [(n, r) for n in wanted.lengths_tokens for r in range(wanted.rounds)]

    def _saved(self, tokens: int, number: int) -> list[int]:
        return prompt(tokens, self._result.settings.seed, "saved", tokens, number)

    # -- one request ------------------------------------------------------------------------

    def _once(
        self, phase: Phase, kind: Kind, name: str, number: int, tokens: Sequence[int]
    ) -> bool:
        """Time to the first token of one prompt; false if the engine is not there."""
        self._screen.step(f"{len(tokens)} tokens, round {number + 1}: {name}, {kind.value}")
        if kind is not Kind.COLD:  # a long computation leaves a machine slow for a moment
            self._guarded(name, lambda e: e.rest(_REST_S))
        answer = self._ask(name, [tokens], 1)
        if answer is None:
            return False
        self._keep(phase, kind, name, number, len(tokens), answer)
        return True

    def _keep(
        self, phase: Phase, kind: Kind, name: str, number: int, tokens: int, answer: Answer
    ) -> None:
        cached = sum(answer.cached_tokens)
        self._result.samples.append(
            Sample(phase, kind, name, tokens, number, round(answer.took_s, 6), cached)
        )

    def _ask(self, name: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> Answer | None:
        found: list[Answer] = []
        self._guarded(name, lambda e: found.append(e.ask(prompts, max_tokens=max_tokens)))
        return found[0] if found else None

    def _rest(self, name: str, tokens: int) -> None:
        longer = (_REST_LONGEST_S - _REST_S) * tokens / MAX_MODEL_TOKENS
        self._guarded(name, lambda e: e.rest(_REST_S + longer))

    def _guarded(self, name: str, call: Callable[[EngineLike], Any]) -> None:
        """Calls an engine if it is there; one that fails is left out from now on."""
        engine = self._engines.get(name)
        if engine is None:
            return
        try:
            call(engine)
        except EngineError as e:
            self._leave_out(name, str(e))

    def _leave_out(self, name: str, why: str) -> None:
        self._result.absent[name] = why
        self._screen.say(f"{name} is left out: {why}")
        engine = self._engines.pop(name, None)
        if engine is not None:
            engine.kill()

    # -- engines ----------------------------------------------------------------------------

    def _open(self, names: Sequence[str], *, from_disk: bool = False) -> None:
        names = [name for name in names if name not in self._result.absent]
        self._screen.say(f"starting engines: {', '.join(names)}")
        self._starts += 1
        for participant in self._of(names):
            chosen = participant.from_disk() if from_disk else participant
            self._engines[participant.name] = self._start(chosen)
        for name in names:
            self._guarded(name, lambda e: e.wait_ready())
            warm = prompt(_WARM_TOKENS, "warm", name, self._starts)
            self._ask(name, [warm], 4)

    def _close(self, names: Sequence[str], *, gently: bool) -> None:
        for name in names:
            engine = self._engines.pop(name)
            if gently:
                engine.stop()
            else:
                engine.kill()


def drop_from_page_cache(folder: Path) -> None:
    """Writes what is dirty and asks the kernel to forget the pages of every file in `folder`."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
