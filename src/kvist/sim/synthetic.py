"""Four kinds of traffic from published statistics, for those who have no trace of their own.

* `chat`: Mooncake's conversation trace. Half of all requests continue a conversation (more surely
  the longer it is), minutes after the last answer; prompts of 12 k tokens in the mean.
* `agent`: coding agents. Sessions of some thirty calls on a context that grows, seconds apart while
  tools run and minutes apart when a person is asked; sub-agents; more than 95 % of tokens repeat.
* `rag`: RAGPulse. A system prompt, then popular passages in an order that varies: 31 % of tokens
  repeat as a prefix, 72 % at whatever place.
* `oneshot`: Azure's code completions, lengths only. Nothing repeats.

A trace starts from nothing: its first sessions open with it. Sessions open as a Poisson process
whose rate is chosen so that the requests asked for come at the rate asked for, in the mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from kvist.core.errors import ConfigError
from kvist.core.hints import Finish
from kvist.core.keys import Key
from kvist.sim.formats import Repeats, chained, component_blocks
from kvist.sim.traces import Request, Trace

_BLOCK_TOKENS = 512
_RAG_BLOCK_TOKENS = 64
_BISECTIONS = 40

# chat: chance that turn 1, 2, ... is followed by another (Mooncake, conversation).
_CONTINUES = (0.34, 0.45, 0.57, 0.66, 0.70, 0.74, 0.78, 0.82, 0.85, 0.87)
_ASSISTANTS = 12
_LONGEST_TOKENS = 126_000

# agent: after a tool call 98.1 % go on, after an answer 74.8 % (710 sessions of coding agents).
_TOOLS_TOKENS = 20_480  # system prompt and tools, shared by all sessions
_COMPACT_TOKENS = 180_000  # at which the context is summed up and starts again
_ANSWERS, _AFTER_TOOL, _AFTER_ANSWER = 0.04, 0.981, 0.748
_SUB_AGENTS, _SUB_AGENT_TURNS = 0.02, 10

# rag: prompts of about 2,800 tokens: a quarter system, half passages, a quarter of their own.
_SYSTEMS, _SYSTEM_TOKENS = 4, 736
_PASSAGES, _PASSAGES_A_PROMPT, _POPULARITY = 4_000, 6, 0.95
_OWN_COMMON = 0.1  # chance that the history is the empty one


@dataclass(frozen=True, slots=True)
class _Chain:
    """Content that only grows; its first `shared_tokens` are common to all of one `trunk`."""

    name: str
    trunk: str
    shared_tokens: int

    def keys(self, tokens: int) -> tuple[Key, ...]:
        """Of its first `tokens`; a partial last block has a name of its own."""
        common = min(tokens, self.shared_tokens) // _BLOCK_TOKENS
        full = tokens // _BLOCK_TOKENS
        names = [f"{self.trunk}.{i}" for i in range(common)]
        names += [f"{self.name}.{i}" for i in range(common, full)]
        if tokens % _BLOCK_TOKENS:
            names.append(f"{self.name}.{full}+{tokens % _BLOCK_TOKENS}")
        return tuple(name.encode() for name in names)


@dataclass(frozen=True, slots=True)
class _Turn:
    """One request of a session, `after_s` its start."""

    after_s: float
    chain: _Chain
    input_tokens: int
    output_tokens: int
    finish: Finish = Finish.UNKNOWN


_Session = list[_Turn]


def _lognormal(random: Random, median: float, sigma: float, most: float) -> int:
    return max(1, int(min(most, median * math.exp(random.gauss(0.0, sigma)))))


def _chat(random: Random, number: int) -> _Session:
    assistant = min(int(random.expovariate(0.6)), _ASSISTANTS - 1)
    shared = 512 * (1 + assistant % 3)
    chain = _Chain(f"c{number}", f"a{assistant}", shared)
    tokens = shared + _lognormal(random, 4_800, 1.15, _LONGEST_TOKENS)
    turns: _Session = []
    after_s = 0.0
    for turn in itertools.count():
        output = _lognormal(random, 300, 0.75, 2_000)
        turns.append(_Turn(after_s, chain, min(tokens, _LONGEST_TOKENS), output))
        goes_on = _CONTINUES[min(turn, len(_CONTINUES) - 1)]
        if random.random() > goes_on or tokens > _LONGEST_TOKENS:
            return turns
        tokens += output + _lognormal(random, 700, 1.3, 30_000)
        after_s += output * 0.03 + min(7200.0, 180 * math.exp(random.gauss(0.0, 1.1)))
    raise AssertionError("unreachable")


def _agent(random: Random, number: int) -> _Session:
    part, after_s = 0, 0.0
    chain = _Chain(f"s{number}.0", "tools", _TOOLS_TOKENS)
    tokens = _TOOLS_TOKENS + _lognormal(random, 20_000, 0.7, 90_000)
    turns: _Session = []
    while True:
        answers = random.random() < _ANSWERS
        output = _lognormal(random, 170, 1.0, 4_000)
        finish = Finish.END_TURN if answers else Finish.TOOL_USE
        turns.append(_Turn(after_s, chain, tokens, output, finish))
        if random.random() > (_AFTER_ANSWER if answers else _AFTER_TOOL):
            return turns
        if not answers and random.random() < _SUB_AGENTS:
            child = _sub_agent(random, f"s{number}.{part}.{len(turns)}", after_s)
            turns += child
            after_s = child[-1].after_s
        median_s, sigma = (201, 1.95) if answers else (17, 1.25)
        after_s += output * 0.02 + min(7200.0, median_s * math.exp(random.gauss(0.0, sigma)))
        tokens += output + _lognormal(random, 1_150, 1.0, 30_000)
        if tokens > _COMPACT_TOKENS:
            part += 1
            chain = _Chain(f"s{number}.{part}", "tools", _TOOLS_TOKENS)
            tokens = _TOOLS_TOKENS + _lognormal(random, 9_000, 0.5, 30_000)


def _sub_agent(random: Random, name: str, after_s: float) -> _Session:
    chain = _Chain(name, "sub-tools", _TOOLS_TOKENS // 4)
    tokens = _TOOLS_TOKENS // 4 + _lognormal(random, 2_500, 0.6, 20_000)
    turns: _Session = []
    for _ in range(_SUB_AGENT_TURNS):
        output = _lognormal(random, 150, 0.8, 2_000)
        after_s += output * 0.02 + min(600.0, 6 * math.exp(random.gauss(0.0, 0.8)))
        turns.append(_Turn(after_s, chain, tokens, output, Finish.SUB_AGENT))
        tokens += output + _lognormal(random, 900, 0.9, 15_000)
    return turns


def _oneshot(random: Random, number: int) -> _Session:
    tokens = _lognormal(random, 1_469, 0.8, 7_437)
    return [_Turn(0.0, _Chain(f"o{number}", "", 0), tokens, _lognormal(random, 14, 1.1, 1_899))]


_SESSIONS: dict[str, Callable[[Random, int], _Session]] = {
    "chat": _chat,
    "agent": _agent,
    "oneshot": _oneshot,
}
KINDS = (*_SESSIONS, "rag")
# Requests and rate a second of each kind unless the user says otherwise: an hour or so.
USUAL = {"chat": (8_000, 3.4), "agent": (5_000, 1.2), "rag": (5_000, 1.0), "oneshot": (6_000, 2.5)}


def synthetic(kind: str, requests: int, rate_per_s: float, seed: int) -> Trace:
    """A trace of `requests` that come at `rate_per_s` in the mean; the same for the same seed.

    Raises:
        ConfigError: an unknown kind, no requests, or a rate that is not above 0.
    """
    if kind not in KINDS:
        raise ConfigError(
            f"no kind of traffic is called {kind!r}",
            path="--synthetic",
            remedy=f"take {', '.join(sorted(KINDS))}",
        )
    if requests < 1:
        raise ConfigError(f"must be at least 1, not {requests}", path="--requests")
    if not 0 < rate_per_s < math.inf:
        raise ConfigError(f"must be above 0, not {rate_per_s:g}", path="--rate")
    random = Random(f"synthetic {kind} {seed}")
    name = f"synthetic-{kind}"
    if kind == "rag":
        return _rag(name, random, requests, rate_per_s)
    sessions = _enough_sessions(_SESSIONS[kind], random, requests, requests / rate_per_s)
    found = [
        Request(
            time_s=start_s + turn.after_s,
            keys=turn.chain.keys(turn.input_tokens),
            input_tokens=turn.input_tokens,
            output_tokens=turn.output_tokens,
            finish=turn.finish,
            session=str(number),
        )
        for number, (start_s, session) in enumerate(sessions)
        for turn in session
    ]
    return Trace.of(name, _BLOCK_TOKENS, sorted(found, key=lambda r: r.time_s)[:requests])


def _enough_sessions(
    draw: Callable[[Random, int], _Session], random: Random, requests: int, span_s: float
) -> Iterator[tuple[float, _Session]]:
    """(start, session) so that the first `requests` of them all take `span_s`."""
    sessions: list[_Session] = []
    opened: list[float] = []  # as a Poisson process of rate 1
    clock = 0.0
    total, needed = 0, 3 * requests
    while True:
        while total < needed:
            sessions.append(draw(random, len(sessions)))
            total += len(sessions[-1])
            clock += random.expovariate(1.0)
            opened.append(clock)
        if _time_of(requests, sessions, opened, 0.0) <= span_s:
            break
        needed *= 2  # even opened all at once they are too few
    low, high = 0.0, 1.0
    while _time_of(requests, sessions, opened, high) < span_s:
        high *= 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _time_of(requests, sessions, opened, middle) < span_s:
            low = middle
        else:
            high = middle
    return ((start * low, session) for start, session in zip(opened, sessions, strict=True))


def _time_of(
    requests: int, sessions: list[_Session], opened: list[float], between_s: float
) -> float:
    """When the last of the first `requests` comes if sessions open every `between_s`."""
    times = sorted(
        start * between_s + turn.after_s
        for start, session in zip(opened, sessions, strict=True)
        for turn in session
    )
    return times[requests - 1] if len(times) >= requests else math.inf


def _rag(name: str, random: Random, requests: int, rate_per_s: float) -> Trace:
    passage_tokens = [_lognormal(random, 200, 0.5, 500) for _ in range(_PASSAGES)]
    weights = list(itertools.accumulate((i + 1) ** -_POPULARITY for i in range(_PASSAGES)))
    repeats, found = Repeats(), []
    numbers = itertools.count(_SYSTEMS + _PASSAGES + 1)
    time_s = 0.0
    for _ in range(requests):
        time_s += random.expovariate(rate_per_s)
        system = min(int(random.expovariate(1.2)), _SYSTEMS - 1)
        chosen = dict.fromkeys(random.choices(range(_PASSAGES), cum_weights=weights, k=12))
        passages = list(chosen)[:_PASSAGES_A_PROMPT]
        random.shuffle(passages)  # retrievers order by score, and the score is of the question
        spans = [(system, _SYSTEM_TOKENS)]
        spans += [(_SYSTEMS + p, passage_tokens[p]) for p in passages]
        empty = random.random() < _OWN_COMMON
        history = _SYSTEMS + _PASSAGES if empty else next(numbers)
        spans.append((history, 11 if empty else _lognormal(random, 500, 0.8, 4_000)))
        spans.append((next(numbers), _lognormal(random, 20, 0.8, 400)))
        repeats.add(spans)
        found.append(
            Request(
                time_s=time_s,
                keys=tuple(chained(component_blocks(spans))),
                input_tokens=sum(tokens for _, tokens in spans),
                output_tokens=_lognormal(random, 150, 0.7, 1_000),
                parts=tuple(spans),
            )
        )
    return Trace.of(name, _RAG_BLOCK_TOKENS, found, repeated_tokens_ratio=repeats.ratio)
