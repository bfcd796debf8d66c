"""NVIDIA Dynamo's cost in blocks, to compare with.

Source: Dynamo 1.5, `lib/kv-router/src/scheduling/selector/default.rs`, with its default weights; of
equal costs one is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvist.router.candidates import Candidate, Prefix
from kvist.router.policies.protocol import Ranked
from kvist.router.protocol import Ask

_HOST_CREDIT, _DISK_CREDIT, _SHARED_CREDIT = 0.75, 0.25, 0.5


class Dynamo(Ranked):
    """Blocks to compute, less credit for those that are there, and blocks that decode reads."""

    def __init__(self, stream: random.Random, block_tokens: int) -> None:
        self._stream = stream
        self._block_tokens = block_tokens

    def rank(self, ask: Ask, candidate: Candidate) -> tuple[float, ...]:
        """`max(0, prefill - credit) + decode`, then a draw."""
        load, size = candidate.load(), self._block_tokens
        prefill = (load.prefill_tokens + ask.prompt_tokens) / size
        decode = load.blocks + load.new_blocks
        cost = max(0.0, prefill - self._credit(candidate.prefix())) + decode
        return cost, self._stream.random()

    def pick_decode(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        """The least unique blocks: a decode replica is given no credit."""
        loads = [(candidate, candidate.load()) for candidate in candidates]
        return min(loads, key=lambda p: (p[1].blocks + p[1].new_blocks, self._stream.random()))[0]

    def _credit(self, prefix: Prefix) -> float:
        host = prefix.own_tokens - prefix.hbm_tokens - prefix.ssd_tokens
        beyond = prefix.reachable_tokens - prefix.own_tokens
        tokens = prefix.hbm_tokens + _HOST_CREDIT * host + _DISK_CREDIT * prefix.ssd_tokens
        return (tokens + _SHARED_CREDIT * beyond) / self._block_tokens
