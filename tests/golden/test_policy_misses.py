"""Exact miss counts: of every policy on generated and public traces, and against libcachesim.

The counts lie in `policies/*.json`. `KVIST_WRITE_GOLDEN=1` writes them anew. Those of libcachesim
are its own, never ours: only writing them needs `pip install libcachesim` (0.3.5).
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from kvist.core.hints import Finish
from kvist.core.keys import Key
from kvist.policy import Arc, EvictionPolicy, Fifo, Lru, Sieve
from kvist.sim.contenders import NAMES, contender
from kvist.sim.formats import read_trace
from kvist.sim.replay import count_misses, replay
from kvist.sim.traces import Request, Trace

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "policies"
TRACES = Path(os.environ.get("KVIST_TRACES", ROOT.parent / "shared" / "traces"))
PUBLIC = ("mooncake/mooncake_trace_first1000.jsonl", "unified/miniswe_b64.jsonl.gz")
SHARES = (0.01, 0.03, 0.1, 0.4)
BLOCK_CAPACITIES = (10, 50, 200, 1000)
PARITY: dict[str, Callable[[int], EvictionPolicy]] = {
    "LRU": lambda _: Lru(),
    "FIFO": lambda _: Fifo(),
    "Sieve": lambda _: Sieve(),
    "ARC": Arc,
}
WRITES = os.environ.get("KVIST_WRITE_GOLDEN") == "1"


@cache
def _generated(kind: str) -> Trace:
    """Chats that think for a while, or agents that go on at once; few of them one-shot."""
    rng = random.Random(kind)
    pause_s, turns, growth = (60.0, 4, 6) if kind == "chat" else (8.0, 20, 3)
    requests = []
    for session in range(150):
        time_s = rng.random() * 1800
        chain = [b"root"]
        for turn in range(1 if rng.random() < 0.2 else rng.randint(2, turns)):
            chain += [b"%d.%d.%d" % (session, turn, n) for n in range(rng.randint(1, growth))]
            finish = Finish.TOOL_USE if kind == "agent" else Finish.UNKNOWN
            requests.append(
                Request(time_s, tuple(chain), 64 * len(chain), rng.randrange(600), finish)
            )
            time_s += pause_s * (0.5 + rng.random())
    return Trace.of(kind, 64, requests)


def _misses(trace: Trace, name: str) -> list[int]:
    counts = []
    for share in SHARES:
        capacity = max(1, int(trace.unique_blocks * share))
        result = replay(trace, contender(name, trace, capacity), capacity)
        counts.append(round((1 - result.block_hit_ratio) * trace.accesses_blocks))
    return counts


def _golden(name: str, current: Callable[[], object]) -> object:
    path = FOLDER / f"{name}.json"
    if WRITES:
        known = json.loads(path.read_text()) if path.exists() else {}
        assert isinstance(known, dict)
        fresh = current()
        assert isinstance(fresh, dict)
        path.write_text(json.dumps(known | fresh, indent=1, sort_keys=True) + "\n")
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["chat", "agent"])
def test_misses_on_generated_traces_are_exact(kind: str, name: str) -> None:
    misses = _misses(_generated(kind), name)
    golden = _golden(f"generated_{kind}", lambda: {name: misses})
    assert isinstance(golden, dict)
    assert misses == golden[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", PUBLIC)
def test_misses_on_public_traces_are_exact(path: str, name: str) -> None:
    if not (TRACES / path).exists():
        pytest.skip(f"no {path} below {TRACES}; set KVIST_TRACES")
    trace = read_trace(TRACES / path)
    misses = _misses(trace, name)
    golden = _golden(f"public_{trace.name}", lambda: {name: misses})
    assert isinstance(golden, dict)
    assert misses == golden[name]


@cache
def _accesses(kind: str) -> tuple[int, ...]:
    """Object numbers: few popular ones, a heavy tail, or a scan mixed with random accesses."""
    rng = random.Random(kind)
    if kind == "pareto":
        return tuple(int(rng.paretovariate(0.6)) % 2000 + 1 for _ in range(20_000))
    if kind == "zipf":
        ranks = range(1, 3001)
        return tuple(rng.choices(ranks, weights=[1 / rank**0.9 for rank in ranks], k=20_000))
    return tuple(
        n % 1200 + 1 if rng.random() < 0.5 else rng.randrange(1, 4000) for n in range(20_000)
    )


def _theirs(name: str, accesses: tuple[int, ...], capacity_blocks: int) -> int:
    import libcachesim

    simulator = getattr(libcachesim, name)(cache_size=capacity_blocks)
    misses = 0
    for number in accesses:
        request = libcachesim.Request()
        request.obj_id, request.obj_size = number, 1
        misses += not simulator.get(request)
    return misses


def _ours(name: str, accesses: tuple[int, ...], capacity_blocks: int) -> int:
    keys: list[Key] = [str(number).encode() for number in accesses]
    return count_misses(keys, PARITY[name](capacity_blocks), capacity_blocks)


@pytest.mark.parametrize("kind", ["zipf", "scan", "pareto"])
@pytest.mark.parametrize("name", sorted(PARITY))
def test_misses_in_block_mode_equal_the_ones_that_libcachesim_counted(name: str, kind: str) -> None:
    accesses = _accesses(kind)
    golden = _golden(
        "libcachesim",
        lambda: {f"{kind} {name}": [_theirs(name, accesses, c) for c in BLOCK_CAPACITIES]},
    )
    assert isinstance(golden, dict)
    assert [_ours(name, accesses, c) for c in BLOCK_CAPACITIES] == golden[f"{kind} {name}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "targets"),
    [
        ("mooncake/conversation_trace.jsonl", (0.104, 0.181, 0.294)),
        ("unified/weka_agentic_200s_b512.jsonl.gz", (0.16, 0.39, 0.82)),
    ],
)
def test_value_reaches_its_targets(path: str, targets: tuple[float, ...]) -> None:
    if not (TRACES / path).exists():
        pytest.skip(f"no {path} below {TRACES}; set KVIST_TRACES")
    trace = read_trace(TRACES / path)
    for share, target in zip((0.01, 0.03, 0.1), targets, strict=True):
        capacity = int(trace.unique_blocks * share)
        result = replay(trace, contender("value", trace, capacity), capacity)
        plain = replay(trace, contender("leaf-lru", trace, capacity), capacity)
        assert result.block_hit_ratio >= target
        assert result.block_hit_ratio >= plain.block_hit_ratio - 0.005
        if share < 0.1:
            assert result.blocks_written <= 0.5 * plain.blocks_written
