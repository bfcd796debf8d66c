"""What to load and what to save for a request: pure decisions, the same for every engine.

Terms: a *block* holds `block_tokens` tokens and is cut from the start of the sequence; an engine
keeps KV in *pages* of `page_tokens`, and a block spans `pages_per_block` of them. Nothing here
touches bytes, clocks or the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvist.core.errors import UnsupportedError
from kvist.core.keys import Key

ChainFn = Callable[[bytes, Sequence[int], int, Mapping[int, bytes] | None], list[Key]]
SKIP_PAGE = -1  # in a page row: this page is not moved


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """How blocks lie over the engine's pages."""

    block_tokens: int
    page_tokens: int

    def __post_init__(self) -> None:
        if self.page_tokens < 1 or self.block_tokens % self.page_tokens:
            raise UnsupportedError(
                f"block_tokens={self.block_tokens} is not a multiple of the engine's "
                f"block size {self.page_tokens}",
                path="$.block_tokens",
                remedy=f"set block_tokens to a multiple of {self.page_tokens}",
            )

    @property
    def pages_per_block(self) -> int:
        return self.block_tokens // self.page_tokens

    def page_row(self, block: int, table: Sequence[int], from_token: int = 0) -> list[int]:
        """Page ids of `block`; pages that lie before `from_token` or past the table are skipped."""
        row = []
        for page in range(block * self.pages_per_block, (block + 1) * self.pages_per_block):
            skipped = page * self.page_tokens < from_token or page >= len(table)
            row.append(SKIP_PAGE if skipped else table[page])
        return row


class KeyChain:
    """The keys of a growing sequence, hashed once."""

    __slots__ = ("_block_tokens", "_chain", "_extras", "_seed", "keys")

    def __init__(
        self,
        seed: bytes,
        block_tokens: int,
        chain: ChainFn,
        extras: Mapping[int, bytes] | None = None,
    ) -> None:
        self._seed = seed
        self._block_tokens = block_tokens
        self._chain = chain
        self._extras = dict(extras or {})
        self.keys: list[Key] = []

    @property
    def seed(self) -> bytes:
        """What the first key depends on beside tokens: keyspace, adapter and salt."""
        return self._seed

    def extend(self, tokens: Sequence[int]) -> list[Key]:
        """Keys of all full blocks of `tokens`, which must begin with the tokens seen before."""
        done = len(self.keys)
        full = len(tokens) // self._block_tokens
        if full > done:
            bt = self._block_tokens
            extras = {i - done: d for i, d in self._extras.items() if i >= done}
            parent = self.keys[-1] if self.keys else self._seed
            self.keys += self._chain(parent, tokens[done * bt : full * bt], bt, extras or None)
        return self.keys

    def parent(self, block: int) -> Key | None:
        """Key of the block before `block`; `None` for the first."""
        return self.keys[block - 1] if block else None


@dataclass(frozen=True, slots=True)
class LoadSpan:
    """Blocks `[first, last)` that a load may bring; the engine has `computed_tokens` already."""

    first: int
    last: int
    computed_tokens: int

    @property
    def blocks(self) -> int:
        return max(0, self.last - self.first)

    def tokens(self, hits: int, block_tokens: int) -> int:
        """Tokens gained by loading the first `hits` blocks of the span."""
        return max(0, (self.first + hits) * block_tokens - self.computed_tokens)


def load_span(
    total_tokens: int, computed_tokens: int, geometry: BlockGeometry, *, leave_tokens: int
) -> LoadSpan:
    """The blocks worth asking for; at least `leave_tokens` are left for the engine to compute."""
    last = max(0, total_tokens - leave_tokens) // geometry.block_tokens
    return LoadSpan(computed_tokens // geometry.block_tokens, last, computed_tokens)


@dataclass(slots=True)
class SaveCursor:
    """How far a sequence's blocks have been offered to the store."""

    next_block: int = 0

    def full_blocks(self, computed_tokens: int, known_tokens: int, block_tokens: int) -> range:
        """Blocks not yet offered whose tokens are all computed and known.

        Draft tokens that may still be rejected are computed but not known: they never count.
        """
        full = min(computed_tokens, known_tokens) // block_tokens
        return range(self.next_block, max(self.next_block, full))

    def advance(self, to_block: int) -> None:
        """Blocks before `to_block` need not be offered again."""
        self.next_block = max(self.next_block, to_block)
