"""Turns a run into medians, ratios and verdicts. Ratios are the result; seconds are context."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from kvist.bench.participants import (
    KVIST,
    LMCACHE,
    OFFLOADING,
    SLOW_ALWAYS,
    SLOW_PLANNED,
    VLLM,
)
from kvist.bench.runner import HARM_TOKENS, SINGLE_TOKENS
from kvist.bench.samples import Kind, Phase, Result

ENOUGH_ROUNDS = 5

TITLES: Mapping[tuple[str, Kind], str] = {
    (VLLM, Kind.COLD): "recompute (vLLM alone)",
    (VLLM, Kind.REPEAT): "vLLM's own prefix hit, in memory",
    (KVIST, Kind.RESTART): "Kvist after an engine restart",
    (KVIST, Kind.DISK): "... from the disk: nothing brought to DRAM at the start",
    (KVIST, Kind.MEMORY): "Kvist from DRAM",
    (KVIST, Kind.REPEAT): "prefix hit in the engine with Kvist",
    (OFFLOADING, Kind.RESTART): "vLLM OffloadingConnector after an engine restart, from its files",
    (OFFLOADING, Kind.DISK): "... none of them in the kernel's page cache",
    (OFFLOADING, Kind.MEMORY): "vLLM OffloadingConnector from its CPU tier",
    (LMCACHE, Kind.RESTART): "LMCache MP after an engine restart, from its server's memory",
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """A quotient of two medians over the same rounds, and the span of the rounds' own quotients."""

    value: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Row:
    """A way to serve a prompt. `why` says why there is no measurement."""

    title: str
    median_s: float | None
    faster: Ratio | None  # recompute ÷ this
    to_prefix_hit: Ratio | None  # this ÷ vLLM's own prefix hit
    why: str = ""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a cache costs where it does not help: time with it ÷ time without."""

    title: str
    median_s: float
    ratio: Ratio


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and whether it was met; `met` is `None` if too few rounds were measured to say."""

    target: str
    measured: Ratio | None
    met: bool | None


def ratio(above_s: Mapping[int, float], below_s: Mapping[int, float]) -> Ratio | None:
    """The quotient over the rounds that both have; `None` if there is none."""
    rounds = sorted(above_s.keys() & below_s.keys())
    if not rounds:
        return None
    each = [above_s[r] / below_s[r] for r in rounds]
    value = median(above_s[r] for r in rounds) / median(below_s[r] for r in rounds)
    return Ratio(value, min(each), max(each), len(rounds))


def reuse_rows(result: Result, prompt_tokens: int) -> list[Row]:
    """One row for each way to serve a prompt of that length."""

    def times_s(name: str, kind: Kind) -> dict[int, float]:
        phase = Phase.DISK if kind is Kind.DISK else Phase.REUSE
        return result.times_s(phase, kind, name, prompt_tokens)

    recompute_s, hit_s = times_s(VLLM, Kind.COLD), times_s(VLLM, Kind.REPEAT)
    rows = []
    for (name, kind), title in TITLES.items():
        times = times_s(name, kind)
        if times:
            rows.append(
                Row(title, median(times.values()), ratio(recompute_s, times), ratio(times, hit_s))
            )
        else:
            rows.append(Row(title, None, None, None, _why_not(result, name, kind, prompt_tokens)))
    return rows


def _why_not(result: Result, name: str, kind: Kind, prompt_tokens: int) -> str:
    if name in result.absent:
        return result.absent[name]
    flawed = [
        s.cached_tokens
        for s in result.flaws()
        if (s.kind, s.participant, s.prompt_tokens) == (kind, name, prompt_tokens)
    ]
    if flawed:
        return f"served only {max(flawed)} of {prompt_tokens} tokens from the cache"
    return "not asked for" if result.complete else "the run ended before it"


def costs(result: Result) -> list[Cost]:
    """What saving adds to a prompt that is computed, and Kvist to a load that reuses nothing."""
    out = []
    for tokens in result.settings.lengths_tokens:
        alone_s = result.times_s(Phase.FILL, Kind.COLD, VLLM, tokens)
        for name, title in (
            (KVIST, "Kvist"),
            (OFFLOADING, "OffloadingConnector"),
            (LMCACHE, "LMCache"),
        ):
            times = result.times_s(Phase.FILL, Kind.COLD, name, tokens)
            found = ratio(times, alone_s)
            if found is not None:
                label = f"first token of a new {tokens}-token prompt, {title} saving"
                out.append(Cost(label, median(times.values()), found))
    more = (
        _flow(result),
        _flow_control(result),
        _first(result),
        _harm(result, SLOW_PLANNED, "loads are planned"),
        _harm(result, SLOW_ALWAYS, "always loading"),
    )
    return out + [cost for cost in more if cost is not None]


def _harm(result: Result, name: str, how: str) -> Cost | None:
    times_s = result.times_s(Phase.HARM, Kind.SLOW, name, HARM_TOKENS)
    alone_s = result.times_s(Phase.HARM, Kind.COLD, VLLM, HARM_TOKENS)
    found = ratio(times_s, alone_s)
    if found is None:
        return None
    title = f"{HARM_TOKENS} tokens on a disk slower than computing them: {how}"
    return Cost(title, median(times_s.values()), found)


def _flow(result: Result) -> Cost | None:
    wanted = result.settings
    found = ratio(_flow_times_s(result, KVIST), _flow_times_s(result, VLLM))
    if found is None:
        return None
    title = (
        f"{wanted.flow_prompts} new prompts of {wanted.flow_prompt_tokens} tokens with "
        f"{wanted.flow_output_tokens} answered, Kvist saving"
    )
    return Cost(title, median(_flow_times_s(result, KVIST).values()), found)


def _first(result: Result) -> Cost | None:
    """The first token of single prompts among those batches, so that nothing ever hit."""
    times_s = result.times_s(Phase.FLOW, Kind.FIRST, KVIST, SINGLE_TOKENS)
    alone_s = result.times_s(Phase.FLOW, Kind.FIRST, VLLM, SINGLE_TOKENS)
    found = ratio(times_s, alone_s)
    if found is None:
        return None
    title = f"first token of {SINGLE_TOKENS} new tokens where nothing ever hits"
    return Cost(title, median(times_s.values()), found)


def _flow_times_s(result: Result, name: str) -> dict[int, float]:
    return result.times_s(Phase.FLOW, Kind.FLOW, name, result.settings.flow_prompt_tokens)


def _flow_control(result: Result) -> Cost | None:
    """The engine alone against itself: medians of single processes ÷ the median of all."""
    times_s = _flow_times_s(result, VLLM)
    starts: dict[int, list[float]] = {}
    for number, took_s in times_s.items():
        starts.setdefault(number // result.settings.batches_per_start(), []).append(took_s)
    if len(starts) < 2:
        return None
    middle = median(times_s.values())
    each = [median(start) / middle for start in starts.values()]
    title = "the same batches, vLLM alone: one start of it ÷ all"
    return Cost(title, middle, Ratio(median(each), min(each), max(each), len(each)))


def verdicts(result: Result) -> list[Verdict]:
    """The targets, at the longest prompt."""
    longest = max(result.settings.lengths_tokens)
    kvist = reuse_rows(result, longest)[list(TITLES).index((KVIST, Kind.RESTART))]
    saving = ratio(
        result.times_s(Phase.FILL, Kind.COLD, KVIST, longest),
        result.times_s(Phase.FILL, Kind.COLD, VLLM, longest),
    )
    flow, first = _flow(result), _first(result)
    slow = _harm(result, SLOW_PLANNED, "")
    at = f"({longest} tokens)"
    return [
        _at_least(f"recompute ÷ Kvist after a restart {at} is at least 25", kvist.faster, 25),
        _at_most(
            f"Kvist after a restart ÷ vLLM's own prefix hit {at} is at most 1.5",
            kvist.to_prefix_hit,
            1.5,
        ),
        _at_most(f"saving: first token with ÷ without Kvist {at} is at most 1.05", saving, 1.05),
        _at_most(
            "nothing reused: time with ÷ without Kvist is at most 1.02",
            flow.ratio if flow else None,
            1.02,
        ),
        _at_most(
            "nothing ever hits: first token with ÷ without Kvist is at most 1.02",
            first.ratio if first else None,
            1.02,
        ),
        _at_most(
            "a disk slower than computing: first token ÷ recompute is at most 1.05",
            slow.ratio if slow else None,
            1.05,
        ),
        _learned(result),
    ]


def _learned(result: Result) -> Verdict:
    target = "prefill times after 50 passes: median relative error is at most 0.15"
    error = result.prefill_error_ratio
    if error is None:
        return Verdict(target, None, None)
    return Verdict(target, Ratio(error, error, error, 1), error <= 0.15)


def _at_least(target: str, measured: Ratio | None, bound: float) -> Verdict:
    return _verdict(target, measured, lambda value: value >= bound)


def _at_most(target: str, measured: Ratio | None, bound: float) -> Verdict:
    return _verdict(target, measured, lambda value: value <= bound)


def _verdict(target: str, measured: Ratio | None, meets: Callable[[float], bool]) -> Verdict:
    enough = measured is not None and measured.rounds >= ENOUGH_ROUNDS
    return Verdict(target, measured, meets(measured.value) if measured and enough else None)


def caveats(result: Result) -> list[str]:
    """What a reader must know before believing the numbers."""
    out = []
    if not result.complete:
        out.append("The run was interrupted; what it had measured is shown.")
    if result.settings.rounds < ENOUGH_ROUNDS:
        out.append(
            f"Only {result.settings.rounds} rounds: too few to judge by; {ENOUGH_ROUNDS} are."
        )
    if result.machine.load_before > 0.5:
        out.append(
            f"The machine was busy before the run (load average {result.machine.load_before})."
        )
    flaws = result.flaws()
    if flaws:
        listed = ", ".join(
            f"{s.participant} {s.kind.value} {s.prompt_tokens} round {s.round + 1}: "
            f"{s.cached_tokens} cached"
            for s in flaws[:5]
        )
        out.append(f"{len(flaws)} samples were not what they should be and were left out: {listed}")
    return out
