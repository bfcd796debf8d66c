"""Replays a trace against a policy and counts what a cache of that order would have saved.

A block is a hit only if every earlier block of its request is one. Requests take no time. The
blocks of a request are used from its leaf to its root, so of one request the tail goes first. A
policy that may refuse (`value`, `belady`) sees all blocks of the request and then loses blocks
until they fit; for the others room is made first, sparing what the request uses, as the store does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvist.core.hints import Hints
from kvist.core.keys import Key
from kvist.policy.filters import InsertFilter
from kvist.policy.protocol import Anticipates, EvictionPolicy, TakesHints
from kvist.sim.traces import Request, Trace

_TICK = 200  # requests between two calls of `progress`
# Llama-3-70B: FLOPs of the prefill of tokens p..n are 2 N (n - p) + 2 L h d (n² - p²).
_LINEAR_FLOPS = 2 * 70e9
_QUADRATIC_FLOPS = 2 * 80 * 64 * 128


@dataclass(frozen=True, slots=True)
class Result:
    """What one policy did at one capacity."""

    policy: str
    capacity_blocks: int
    block_hit_ratio: float
    token_hit_ratio: float
    flops_saved_ratio: float
    blocks_written: int


class VirtualClock:
    """The trace's time, for policies that ask for it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy ready for one replay.

    Attributes:
        name: as in the result.
        policy: empty, for the capacity of the replay.
        clock: what the policy reads the time from.
        may_refuse: whether new blocks may be victims themselves.
        insert_filter: which blocks may enter at all; None for all.
    """

    name: str
    policy: EvictionPolicy
    clock: VirtualClock
    may_refuse: bool = False
    insert_filter: InsertFilter | None = None


class Cache:
    """The keys that are resident, kept in step with a policy.

    Args:
        contender: the policy; used up afterwards.
        capacity_blocks: most blocks at the end of each request.
        evicted: gets what leaves, if somebody wants to know.
    """

    def __init__(
        self, contender: Contender, capacity_blocks: int, evicted: list[Key] | None = None
    ) -> None:
        self.evicted = evicted
        self.policy = contender.policy
        self.filter = contender.insert_filter
        self.capacity_blocks = capacity_blocks
        self.resident: set[Key] = set()
        self.written = 0

    def evict(self, count: int, spared: Iterable[Key]) -> int:
        """Evicts up to `count` blocks that are not `spared`; returns how many it did."""
        if count <= 0:
            return 0
        spared = set(spared)
        resident, remove = self.resident, self.policy.remove
        left = count
        for key in self.policy.victims():
            if key in spared:
                continue
            remove(key)
            resident.discard(key)
            if self.evicted is not None:
                self.evicted.append(key)
            left -= 1
            if not left:
                break
        return count - left

    def use(self, keys: tuple[Key, ...]) -> None:
        """Touches and inserts from the leaf to the root."""
        resident, touch, insert = self.resident, self.policy.touch, self.policy.insert
        for i in range(len(keys) - 1, -1, -1):
            key = keys[i]
            if key in resident:
                touch(key)
            else:
                insert(key, keys[i - 1] if i else None)
                resident.add(key)

    def serve(self, keys: tuple[Key, ...]) -> None:
        """Makes room, then uses what fits."""
        resident = self.resident
        missing = [key for key in keys if key not in resident]
        if missing and self.filter is not None:
            keys, missing = self._admitted(keys, self.filter)
        over = len(resident) + len(missing) - self.capacity_blocks
        if over > 0:
            over -= self.evict(over, keys)
        if over > 0:  # the request is larger than the cache: its root stays
            dropped = set(missing[-over:])
            missing = missing[:-over]
            keys = tuple(key for key in keys if key not in dropped)
        self.written += len(missing)
        self.use(keys)

    def _admitted(
        self, keys: tuple[Key, ...], insert_filter: InsertFilter
    ) -> tuple[tuple[Key, ...], list[Key]]:
        """The prefix that may enter: what follows a refused block could never be matched."""
        missing: list[Key] = []
        for i, key in enumerate(keys):
            if key in self.resident:
                continue
            if not insert_filter.admits(key):
                for later in keys[i + 1 :]:
                    insert_filter.admits(later)  # it has been seen, too
                return keys[:i], missing
            missing.append(key)
        return keys, missing

    def serve_then_trim(self, keys: tuple[Key, ...]) -> None:
        """Uses everything, then evicts what does not fit, new blocks included."""
        resident = self.resident
        new = [key for key in keys if key not in resident]
        self.use(keys)
        self.evict(len(resident) - self.capacity_blocks, ())
        self.written += sum(key in resident for key in new)


@contextmanager
def collector_paused() -> Iterator[None]:
    """A replay makes no garbage in cycles, and looking for it took a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@collector_paused()
def replay(
    trace: Trace,
    contender: Contender,
    capacity_blocks: int,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Runs every request of `trace` past a cache that starts empty.

    Args:
        trace: the requests.
        contender: the policy; used up afterwards.
        capacity_blocks: most blocks at the end of each request.
        progress: gets the number of requests done, every few hundred.
    """
    cache = Cache(contender, capacity_blocks)
    resident = cache.resident
    policy, clock = contender.policy, contender.clock
    begin = policy.begin if isinstance(policy, TakesHints) else None
    serve = cache.serve_then_trim if contender.may_refuse else cache.serve
    hit_blocks = hit_tokens = input_tokens = 0
    saved_flops = all_flops = 0.0
    for number, request in enumerate(trace.requests):
        keys = request.keys
        clock.now_s = request.time_s
        if begin is not None:
            begin(hints_of(request, trace.block_tokens))
        hits = run_length(keys, resident)
        hit_blocks += hits
        tokens = min(hits * trace.block_tokens, request.input_tokens)
        hit_tokens += tokens
        input_tokens += request.input_tokens
        saved_flops += prefill_flops(tokens)
        all_flops += prefill_flops(request.input_tokens)
        serve(keys)
        if progress is not None and number % _TICK == 0:
            progress(number)
    return Result(
        policy=contender.name,
        capacity_blocks=capacity_blocks,
        block_hit_ratio=hit_blocks / max(1, trace.accesses_blocks),
        token_hit_ratio=hit_tokens / max(1, input_tokens),
        flops_saved_ratio=saved_flops / max(1.0, all_flops),
        blocks_written=cache.written,
    )


def hints_of(request: Request, block_tokens: int) -> Hints:
    """What a request tells the policies that listen."""
    partial = request.keys[-1] if request.keys and request.input_tokens % block_tokens else None
    return Hints(request.finish, request.output_tokens, partial)


def run_length(keys: Iterable[Key], resident: Container[Key]) -> int:
    """How many keys from the first on are resident."""
    hits = 0
    for key in keys:
        if key not in resident:
            break
        hits += 1
    return hits


def prefill_flops(tokens: int) -> float:
    """FLOPs of the prefill of that many tokens from nothing, for Llama-3-70B."""
    return _LINEAR_FLOPS * tokens + _QUADRATIC_FLOPS * tokens * tokens


def count_misses(accesses: Iterable[Key], policy: EvictionPolicy, capacity_blocks: int) -> int:
    """Misses in plain block mode: each access stands for itself, as in libcachesim."""
    expect = policy.expect if isinstance(policy, Anticipates) else None
    resident: set[Key] = set()
    misses = 0
    for key in accesses:
        if key in resident:
            policy.touch(key)
            continue
        misses += 1
        if expect is not None:
            expect(key)
        while len(resident) >= capacity_blocks:
            victim = next(iter(policy.victims()))
            policy.remove(victim)
            resident.discard(victim)
        policy.insert(key, None)
        resident.add(key)
    return misses
