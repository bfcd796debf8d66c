"""What requests take of one engine's HBM: their prompts, shared blocks, and growth."""

from __future__ import annotations

from kvist.core.keys import Key
from kvist.sim.des.pools import HbmPool
from kvist.sim.des.sequence import Sequence

_WATERMARK = 0.01  # of HBM that stays free when a request is let in beside others


class Memory:
    """Takes and gives HBM in the name of requests, and notes with them what they hold."""

    __slots__ = ("_reserve_tokens", "block_tokens", "pool")

    def __init__(self, pool: HbmPool) -> None:
        self.pool = pool
        self.block_tokens = pool.block_tokens
        self._reserve_tokens = int(pool.capacity_tokens * _WATERMARK)

    def usable(self, sequence: Sequence) -> tuple[Key, ...]:
        """Keys of blocks that can spare computing: one token at least is computed."""
        return sequence.keys[: (sequence.prompt_tokens - 1) // self.block_tokens]

    def matched(self, keys: tuple[Key, ...]) -> int:
        """How many of the first `keys` are in HBM."""
        return self.pool.matched(keys) if self.pool.keeps else 0

    def cached_tokens(self, sequence: Sequence) -> int:
        """Prompt tokens that are in HBM now."""
        return self.matched(self.usable(sequence)) * self.block_tokens

    def reserve(self, sequence: Sequence, *, crowded: bool) -> bool:
        """Takes HBM for a prompt and its next token, sharing the blocks that are there.

        Args:
            crowded: others run, so some must stay free for them to grow.
        """
        keys = self.usable(sequence)
        keys = keys[: self.matched(keys)]
        self.pool.hold(keys)
        cached = len(keys) * self.block_tokens
        need = sequence.prompt_tokens + 1 - cached
        if not self._take(need, crowded=crowded):
            self.pool.release(keys)
            return False
        sequence.held_blocks, sequence.nameless_tokens = len(keys), need
        sequence.computed_tokens = cached
        return True

    def receive(self, sequence: Sequence, *, crowded: bool) -> bool:
        """Takes HBM for a request whose KV was computed elsewhere."""
        if not self._take(sequence.context_tokens, crowded=crowded):
            return False
        sequence.nameless_tokens = sequence.context_tokens
        return True

    def name(self, sequence: Sequence) -> None:
        """Makes the full blocks of what is computed of a prompt known, to be shared."""
        full = sequence.computed_tokens // self.block_tokens
        new = sequence.keys[sequence.held_blocks : full]
        if self.pool.keeps and new:
            self.pool.name(new)
            sequence.nameless_tokens -= len(new) * self.block_tokens
            sequence.held_blocks += len(new)

    def recount(self, sequence: Sequence) -> None:
        """Notes what a request holds that decoded: all its context."""
        held = sequence.held_blocks * self.block_tokens
        sequence.nameless_tokens = sequence.context_tokens - held

    def release(self, sequence: Sequence) -> None:
        """Gives back what a request holds; named blocks stay until room is needed."""
        self.pool.release(sequence.keys[: sequence.held_blocks])
        self.pool.give(sequence.nameless_tokens)
        sequence.held_blocks = sequence.nameless_tokens = 0

    def _take(self, tokens: int, *, crowded: bool) -> bool:
        reserve = self._reserve_tokens if crowded else 0
        return self.pool.spare_tokens >= tokens + reserve and self.pool.take(tokens)
