"""The policies by name, ready for one replay: the live ones, filtered ones, and the oracle."""

from __future__ import annotations

from collections.abc import Callable

from kvist.core.keys import Key
from kvist.policy.arc import Arc
from kvist.policy.belady import Belady
from kvist.policy.fifo import Fifo
from kvist.policy.filters import SecondSight
from kvist.policy.gdsf import Gdsf
from kvist.policy.leaf_lru import LeafLru
from kvist.policy.lirs import Lirs
from kvist.policy.lru import Lru
from kvist.policy.protocol import EvictionPolicy
from kvist.policy.s3_fifo import S3Fifo
from kvist.policy.sieve import Sieve
from kvist.policy.value import Value
from kvist.policy.w_tinylfu import WTinyLfu
from kvist.policy.weights import Weigh
from kvist.sim.replay import Contender, VirtualClock, prefill_flops
from kvist.sim.traces import Trace

_SECOND_SIGHT_CAPACITIES = 8
_PLAIN: dict[str, Callable[[int], EvictionPolicy]] = {
    "arc": Arc,
    "fifo": lambda _: Fifo(),
    "gdsf": lambda _: Gdsf(),
    "leaf-lru": lambda _: LeafLru(),
    "lirs": Lirs,
    "lru": lambda _: Lru(),
    "s3-fifo": S3Fifo,
    "sieve": lambda _: Sieve(),
    "w-tinylfu": WTinyLfu,
}

NAMES = (*_PLAIN, "second-sight", "value", "value-cost", "belady")


def contender(name: str, trace: Trace, capacity_blocks: int) -> Contender:
    """A new policy for one replay of `trace`.

    `second-sight` is leaf-LRU behind the filter of that name; `value-cost` weighs each block by
    what it costs to recompute, so it saves FLOPs rather than blocks.

    Raises:
        KeyError: `name` is not one of `NAMES`.
    """
    clock = VirtualClock()
    if name == "value":
        return Contender(name, Value(clock), clock, may_refuse=True)
    if name == "value-cost":
        policy = Value(clock, weigh=recompute_weight(trace))
        return Contender(name, policy, clock, may_refuse=True)
    if name == "belady":
        oracle = Belady(request.keys for request in trace.requests)
        return Contender(name, oracle, clock, may_refuse=True)
    if name == "second-sight":
        seen = SecondSight(_SECOND_SIGHT_CAPACITIES * capacity_blocks)
        return Contender(name, LeafLru(), clock, insert_filter=seen)
    return Contender(name, _PLAIN[name](capacity_blocks), clock)


def recompute_weight(trace: Trace) -> Weigh:
    """FLOPs to recompute a block that follows its prefix, over those of a first block."""
    depths: dict[Key, int] = {}
    for request in trace.requests:
        for depth, key in enumerate(request.keys):
            depths.setdefault(key, depth)
    first = prefill_flops(trace.block_tokens)

    def weigh(key: Key) -> float:
        start = depths[key] * trace.block_tokens
        return (prefill_flops(start + trace.block_tokens) - prefill_flops(start)) / first

    return weigh
