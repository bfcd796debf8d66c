"""Where blocks should be: weighted rendezvous hashing of prefix groups, over failure domains.

A prefix stays together. The chain of a prompt is cut once, after its first G blocks:

    key_0 ... key_{G-1} | key_G  key_{G+1}  ...
    group key_0         | group key_{G-1}

The head of a prompt goes where its first block belongs: prompts that begin alike share it. The body
goes where the first G blocks, which `key_{G-1}` names, belong: whatever follows them is together.
So a prompt is in at most two groups, two prompts that part after G blocks share both, and a node
that knows a block's parent knows its group.

A node's score for a group is `-w / ln(u)`: w its weight, u in (0, 1) a hash of node and group. The
highest scores win, one a failure domain; with fewer domains than replicas there are fewer replicas.
A change of one node moves only what goes to it or comes from it.

Source: Thaler, Ravishankar, "Using name-based mappings to increase hit rates" (1998); the weights
by Schindelhauer, Schomaker, "Weighted distributed hash tables" (SPAA 2005).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import xxhash

from kvist.cluster.record import NodeRecord
from kvist.core.keys import Key

FULL_WEIGHT_BYTES = 1 << 20  # free bytes of weight 1
_SLOW_START_STEPS = 8
_MOST_CACHED = 1 << 16


def group_keys(keys: Sequence[Key], group_blocks: int) -> list[Key]:
    """The group of each block of a chain that begins at its first block.

    Raises:
        ValueError: `group_blocks` is below 1.
    """
    if group_blocks < 1:
        raise ValueError("group_blocks is at least 1")
    if len(keys) <= group_blocks:
        return list(keys[:1]) * len(keys)
    body = keys[group_blocks - 1]
    return [keys[0]] * group_blocks + [body] * (len(keys) - group_blocks)


def first_of(key: Key, nodes: Iterable[str]) -> str | None:
    """One of some nodes, the same to everybody, another for another block; weights aside."""
    seed = xxhash.xxh3_64_intdigest(key)
    return min(nodes, key=lambda n: (xxhash.xxh3_64_intdigest(n.encode(), seed), n), default=None)


def own_weight(free_bytes: int, *, age_s: float, slow_start_s: float) -> int:
    """The weight that a node says of itself.

    Free mebibytes, rounded down to a power of two, so that it seldom changes; a newcomer begins at
    an eighth of it and gains another eighth each time an eighth of `slow_start_s` is over.
    """
    full = free_bytes // FULL_WEIGHT_BYTES
    if full <= 0:
        return 0
    full = 1 << (full.bit_length() - 1)
    if slow_start_s <= 0 or age_s >= slow_start_s:
        return full * _SLOW_START_STEPS
    step = 1 + int(age_s / slow_start_s * _SLOW_START_STEPS)
    return full * min(step, _SLOW_START_STEPS)


class Placement:
    """The places of groups among the nodes of one moment."""

    def __init__(self, takers: Iterable[NodeRecord], *, replicas: int) -> None:
        """Among `takers`, the nodes that may be given something new.

        Raises:
            ValueError: `replicas` is below 1.
        """
        if replicas < 1:
            raise ValueError("replicas is at least 1")
        self.replicas = replicas
        self._nodes = [(r.node, float(r.weight), r.failure_domain) for r in takers if r.weight > 0]
        self._ranks: dict[Key, tuple[tuple[str, str], ...]] = {}

    def rank(self, group: Key) -> tuple[tuple[str, str], ...]:
        """All nodes and their failure domains, the best place for the group first."""
        found = self._ranks.get(group)
        if found is None:
            if len(self._ranks) >= _MOST_CACHED:
                self._ranks.clear()
            found = self._ranks[group] = self._ranked(group)
        return found

    def places(self, group: Key) -> list[str]:
        """The nodes that should have the group; fewer than `replicas` if domains are lacking."""
        return self.further(group, ())

    def further(
        self, group: Key, domains: Iterable[str], *, without: frozenset[str] = frozenset()
    ) -> list[str]:
        """The nodes that should get it where copies are in these `domains` already.

        Args:
            without: nodes that are not asked.
        """
        taken = set(domains)
        chosen: list[str] = []
        lacking = self.replicas - len(taken)
        if lacking <= 0:
            return chosen
        for node, domain in self.rank(group):
            if domain in taken or node in without:
                continue
            taken.add(domain)
            chosen.append(node)
            if len(chosen) == lacking:
                break
        return chosen

    def _ranked(self, group: Key) -> tuple[tuple[str, str], ...]:
        scored = [
            (weight / neglog, node, domain)
            for (node, weight, domain) in self._nodes
            for neglog in (_neglog(group, node),)
        ]
        scored.sort(reverse=True)
        return tuple((node, domain) for _, node, domain in scored)


@lru_cache(maxsize=_MOST_CACHED)
def _neglog(group: Key, node: str) -> float:
    """`-ln(u)` of a u in (0, 1) that group and node decide; never 0."""
    number = xxhash.xxh3_64_intdigest(node.encode(), xxhash.xxh3_64_intdigest(group))
    return -math.log(((number >> 12) + 0.5) / 2**52)
