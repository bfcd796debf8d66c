"""A part of a trace that stands for the whole: all requests of some of its sessions.

Theory of operation. SHARDS samples a cache's keys by their hash and shrinks the cache alike. Blocks
of prompts are chains, so what is sampled here are trees: requests that share more than the *trunk*,
the blocks that a good part of all requests has (system prompts, tools). The trunk stays whole. Of
several draws the one is taken whose ideal hit ratio is nearest to the whole trace's.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass

from kvist.core.keys import Key
from kvist.sim.advise.traffic import Ideal
from kvist.sim.traces import Trace

_TRUNK_RATIO = 0.03  # of all requests
_DRAWS = 16


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled trace and how to scale a cache to it.

    Attributes:
        share_ratio: accesses of the sample over all.
        trunk_blocks: blocks that are kept whole.
        unique_ratio: different blocks of the sample over all, without the trunk.
        ideal_error_ratio: its ideal hit ratio less the whole trace's.
    """

    trace: Trace
    share_ratio: float
    trunk_blocks: int
    unique_ratio: float
    ideal_error_ratio: float

    def capacity_blocks(self, whole_blocks: int) -> int:
        """What a cache of `whole_blocks` is in the sample."""
        if whole_blocks <= self.trunk_blocks:
            return max(1, whole_blocks)
        above = whole_blocks - self.trunk_blocks
        return max(1, self.trunk_blocks + round(above * self.unique_ratio))


@dataclass(slots=True)
class _Tree:
    members: list[int]
    accesses: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0


def sample(trace: Trace, known: Ideal, most_accesses: int, seed: int) -> Sample:
    """`trace` itself if it is small enough, else about `most_accesses` of it.

    Args:
        known: ideal hits of the trace.
    """
    if trace.accesses_blocks <= most_accesses:
        return Sample(trace, 1.0, 0, 1.0, 0.0)
    counts = Counter(key for request in trace.requests for key in request.keys)
    bound = max(2.0, _TRUNK_RATIO * len(trace.requests))
    trunk = {key for key, count in counts.items() if count >= bound}
    trees = _trees(trace, known, trunk)
    whole = _hit_ratio(list(trees.values()))
    draws = [_draw(trees, most_accesses, f"{seed}.{n}") for n in range(_DRAWS)]
    chosen = min(draws, key=lambda draw: abs(_hit_ratio(draw) - whole))
    members = sorted(i for tree in chosen for i in tree.members)
    part = Trace.of(
        trace.name,
        trace.block_tokens,
        [trace.requests[i] for i in members],
        repeated_tokens_ratio=trace.repeated_tokens_ratio,
    )
    outside = len(counts) - len(trunk)
    inside = part.unique_blocks - len(
        trunk & {key for request in part.requests for key in request.keys}
    )
    return Sample(
        trace=part,
        share_ratio=part.accesses_blocks / trace.accesses_blocks,
        trunk_blocks=len(trunk),
        unique_ratio=inside / max(1, outside),
        ideal_error_ratio=_hit_ratio(chosen) - whole,
    )


def _trees(trace: Trace, known: Ideal, trunk: set[Key]) -> dict[Key, _Tree]:
    trees: dict[Key, _Tree] = defaultdict(lambda: _Tree([]))
    for i, request in enumerate(trace.requests):
        root = next((key for key in request.keys if key not in trunk), b"request %d" % i)
        tree = trees[root]
        tree.members.append(i)
        tree.accesses += len(request.keys)
        tree.input_tokens += request.input_tokens
        tree.hit_tokens += known.hit_tokens[i]
    return dict(trees)


def _draw(trees: dict[Key, _Tree], most_accesses: int, salt: str) -> list[_Tree]:
    """Trees in the order of their hash until they have enough accesses; at least one."""
    key = salt.encode()

    def place(root: Key) -> bytes:
        return hashlib.blake2b(root, digest_size=8, key=key).digest()

    chosen: list[_Tree] = []
    accesses = 0
    for root in sorted(trees, key=place):
        tree = trees[root]
        if chosen and accesses + tree.accesses > most_accesses:
            break
        chosen.append(tree)
        accesses += tree.accesses
    return chosen


def _hit_ratio(trees: list[_Tree]) -> float:
    return sum(t.hit_tokens for t in trees) / max(1, sum(t.input_tokens for t in trees))
