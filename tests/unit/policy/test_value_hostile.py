"""Traffic made to fool the value policy: it must never lose much to leaf-first LRU.

Each trace is generated from a seed. `test_value_is_never_far_below_leaf_lru` is the promise; the
others say what the policy does with such traffic.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest

from kvist.sim.contenders import contender
from kvist.sim.replay import Result, replay
from kvist.sim.traces import Request, Trace

_BLOCK_TOKENS = 64
_SHARES = (0.02, 0.1, 0.4)
_MOST_LOST = 0.005  # of accesses

_Chains = list[tuple[float, list[str]]]  # time of arrival in seconds, names of blocks


def _prompt(name: str, blocks: int) -> list[str]:
    return [f"{name}.{n}" for n in range(blocks)]


def _loop(rng: random.Random) -> _Chains:
    """The same prompts round and round: more than any cache but the largest holds."""
    return [(2.0 * n, _prompt(f"p{n % 150}", 8)) for n in range(1500)]


def _scan(rng: random.Random) -> _Chains:
    """A small hot set, and between its uses prompts that never come back."""
    return [
        (1.0 * n, _prompt(f"hot{rng.randrange(12)}" if n % 3 else f"cold{n}", 6))
        for n in range(2000)
    ]


def _one_shot_then_chats(rng: random.Random) -> _Chains:
    """Nothing comes back for an hour; then every prompt does, soon."""
    chains = [(3.0 * n, _prompt(f"once{n}", 5)) for n in range(1000)]
    for n in range(1200):
        chains.append((3000.0 + 3.0 * n, _prompt(f"chat{max(0, n // 4 - rng.randrange(2))}", 6)))
    return chains


def _chats_then_one_shot(rng: random.Random) -> _Chains:
    """What came back for an hour comes back no more; other prompts come twice, at once."""
    chains = [(2.0 * n, _prompt(f"chat{rng.randrange(60)}", 6)) for n in range(1000)]
    chains += [(2000.0 + 2.0 * n, _prompt(f"pair{n // 2}", 6)) for n in range(1200)]
    return chains


def _think_time_jumps(rng: random.Random) -> _Chains:
    """Chats whose pauses are a minute, then five seconds, then a minute."""
    chains: _Chains = []
    for session in range(600):
        start_s = 5.0 * session
        pause_s = 5.0 if 200 <= session < 400 else 60.0
        for turn in range(rng.randrange(1, 6)):
            time_s = start_s + turn * pause_s * (0.7 + 0.6 * rng.random())
            chains.append((time_s, _prompt(f"s{session}", 4 + 3 * turn)))
    return chains


def _tiny(rng: random.Random) -> _Chains:
    """Fifty requests in all: there is hardly anything to learn from."""
    return [(7.0 * n, _prompt(f"p{rng.randrange(12)}", 10)) for n in range(50)]


def _giants(rng: random.Random) -> _Chains:
    """A few prompts, each larger than the small caches; some share a half."""
    return [
        (30.0 * n, _prompt("base", 300) + _prompt(f"g{rng.randrange(5)}", rng.choice([20, 400])))
        for n in range(40)
    ]


def _all_equal(rng: random.Random) -> _Chains:
    return [(1.0 * n, _prompt("same", 40)) for n in range(300)]


def _rag(rng: random.Random) -> _Chains:
    """A system prompt, a document of a skewed popularity, a question of its own."""
    chains: _Chains = []
    for n in range(1500):
        document = int(rng.paretovariate(0.8)) % 400
        prefix = _prompt("system", 3) + _prompt(f"system.d{document}", 10)
        chains.append((4.0 * n, prefix + _prompt(f"system.d{document}.q{n}", 2)))
    return chains


def _same_second(rng: random.Random) -> _Chains:
    """Requests in bursts of one time stamp."""
    return [(60.0 * (n // 40), _prompt(f"b{rng.randrange(90)}", 7)) for n in range(1600)]


def _last_in_first_out(rng: random.Random) -> _Chains:
    """What was used last comes back first: LRU's home ground."""
    chains: _Chains = []
    stack: list[int] = []
    for n in range(2000):
        if stack and rng.random() < 0.6:
            back = min(len(stack), int(rng.expovariate(0.5)) + 1)
            chains.append((1.5 * n, _prompt(f"u{stack[-back]}", 5)))
        else:
            stack.append(n)
            chains.append((1.5 * n, _prompt(f"u{n}", 5)))
    return chains


def _decoys(rng: random.Random) -> _Chains:
    """Prompts come back five times at once and never again: a rich past, no future."""
    chains: _Chains = []
    for n in range(400):
        for again in range(5):
            chains.append((20.0 * n + again, _prompt(f"decoy{n}", 6)))
        chains.append((20.0 * n + 10.0, _prompt(f"pair{n // 2}", 6)))
    return chains


_HOSTILE: dict[str, Callable[[random.Random], _Chains]] = {
    make.__name__.removeprefix("_"): make
    for make in (
        _loop,
        _scan,
        _one_shot_then_chats,
        _chats_then_one_shot,
        _think_time_jumps,
        _tiny,
        _giants,
        _all_equal,
        _rag,
        _same_second,
        _last_in_first_out,
        _decoys,
    )
}


@cache
def _trace(kind: str) -> Trace:
    return Trace.of(
        kind,
        _BLOCK_TOKENS,
        [
            Request(time_s, tuple(name.encode() for name in names), _BLOCK_TOKENS * len(names), 100)
            for time_s, names in _HOSTILE[kind](random.Random(kind))
        ],
    )


def _run(kind: str, policy: str, share: float) -> Result:
    trace = _trace(kind)
    capacity = max(1, int(trace.unique_blocks * share))
    return replay(trace, contender(policy, trace, capacity), capacity)


@pytest.mark.parametrize("share", _SHARES)
@pytest.mark.parametrize("kind", sorted(_HOSTILE))
def test_value_is_never_far_below_leaf_lru(kind: str, share: float) -> None:
    ours, lru = _run(kind, "value", share), _run(kind, "leaf-lru", share)
    assert ours.block_hit_ratio >= lru.block_hit_ratio - _MOST_LOST


def test_value_keeps_a_part_of_a_loop_that_lru_loses_whole() -> None:
    ours, best = _run("loop", "value", 0.1), _run("loop", "belady", 0.1)
    assert _run("loop", "leaf-lru", 0.1).block_hit_ratio == 0
    assert ours.block_hit_ratio > 0.7 * best.block_hit_ratio
    assert ours.blocks_written < 0.25 * _run("loop", "leaf-lru", 0.1).blocks_written


def test_value_keeps_a_hot_set_through_a_scan() -> None:
    gain = _run("scan", "value", 0.02).block_hit_ratio
    assert gain > 1.1 * _run("scan", "leaf-lru", 0.02).block_hit_ratio


def test_value_is_leaf_lru_on_a_trace_too_short_to_learn_from() -> None:
    ours, lru = _run("tiny", "value", 0.1), _run("tiny", "leaf-lru", 0.1)
    assert ours.block_hit_ratio == lru.block_hit_ratio
    assert ours.blocks_written == lru.blocks_written


def test_value_writes_little_of_traffic_that_never_comes_back() -> None:
    requests = [
        Request(3.0 * n, tuple(b"%d.%d" % (n, i) for i in range(5)), 5 * _BLOCK_TOKENS, 100)
        for n in range(2500)
    ]
    trace = Trace.of("one-shot", _BLOCK_TOKENS, requests)
    result = replay(trace, contender("value", trace, 200), 200)
    assert result.blocks_written < 0.5 * trace.accesses_blocks
