"""The index of cached text: which runs of a prompt are stored somewhere, whatever precedes them.

`store` registers the blocks of a sequence with their tokens, `find` looks a prompt up. A sequence
is marked where its content says so (`cutting.py`); a prompt is marked the same way, and where a
fingerprint of it is known, the tokens themselves are compared, from there to both sides until they
differ. So a fingerprint that collides, by chance or by intent, costs a comparison and nothing else,
and a span is as long as the text that is the same.

Every place of the prompt is looked up, and every owner of a fingerprint is tried: what comes back
are *candidates* that may overlap, since not all of them may still be there when they are loaded.
`choice.py` decides afterwards.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvist.accel.blend.cutting import Cutter, Marks, Tokens, as_tokens
from kvist.core.keys import Key
from kvist.native import SpanTable, digest

MOST_TOKENS = 1 << 24
OWNERS = 8
ALTERNATIVES = 4
# A lookup compares at most so many times the tokens of its prompt, and this many besides.
_BUDGET_RATIO = 32
_BUDGET_TOKENS = 1 << 14

Cut = Callable[[Tokens, int], Marks]


@dataclass(frozen=True, slots=True)
class FoundSpan:
    """A run of tokens in a prompt that is cached, token by token the same.

    Attributes:
        start: first token in the prompt.
        stop: one behind the last.
        source_start: the position in its sequence at which the first token is stored; keys are to
            be rotated by `start - source_start`.
        keys: the blocks that hold its rows, in order; the first one's first row is that of
            position `source_start // block_tokens * block_tokens`.
        block_tokens: tokens of a block.
    """

    start: int
    stop: int
    source_start: int
    keys: tuple[Key, ...]
    block_tokens: int

    @property
    def tokens(self) -> int:
        """How long it is."""
        return self.stop - self.start

    @property
    def shift_tokens(self) -> int:
        """How far it moves from where it is stored, to the right if positive."""
        return self.start - self.source_start

    @property
    def first_row(self) -> int:
        """The row of its first token in the first of its blocks."""
        return self.source_start % self.block_tokens

    def part(self, start: int, stop: int) -> FoundSpan:
        """What it holds of [start, stop) of the prompt.

        Raises:
            ValueError: that is nothing, or more than it holds.
        """
        if not self.start <= start < stop <= self.stop:
            raise ValueError(f"[{start}, {stop}) is no part of [{self.start}, {self.stop})")
        source_start = self.source_start + start - self.start
        skipped = source_start // self.block_tokens - self.source_start // self.block_tokens
        rows = source_start % self.block_tokens + stop - start
        keys = self.keys[skipped : skipped + -(-rows // self.block_tokens)]
        return FoundSpan(start, stop, source_start, keys, self.block_tokens)


@dataclass(frozen=True, slots=True)
class SpanStats:
    """What an index holds, and how often a limit of it was reached.

    Attributes:
        blocks: registered blocks.
        tokens: their tokens.
        marks: fingerprints with an owner; one with several owners counts as several.
        memory_bytes: what the table takes; of the Python twin an estimate.
        evicted_blocks: forgotten because of `most_tokens`.
        crowded_marks: owners forgotten because a fingerprint had too many.
        curtailed_lookups: ended early, with a part of what they would have found.
    """

    blocks: int = 0
    tokens: int = 0
    marks: int = 0
    memory_bytes: int = 0
    evicted_blocks: int = 0
    crowded_marks: int = 0
    curtailed_lookups: int = 0


class SpanIndex:
    """Finds cached text at any place of a prompt. Thread-safe; every call is bounded.

    Args:
        most_tokens: above it, the blocks go that were stored longest ago.
        owners: most places that are kept of one fingerprint; the newest stay.
        least_tokens: shorter runs are not found; None for the window of a fingerprint.
        cutter: where sequences are marked.
        cut: marks in place of `cutter`, for tests.
        secret: seeds the fingerprints; random if None, so that nobody can craft collisions.
    """

    def __init__(
        self,
        *,
        most_tokens: int = MOST_TOKENS,
        owners: int = OWNERS,
        least_tokens: int | None = None,
        cutter: Cutter | None = None,
        cut: Cut | None = None,
        secret: bytes | None = None,
    ) -> None:
        self._cutter = cutter if cutter is not None else Cutter()
        self._cut: Cut = cut if cut is not None else self._cutter
        self._least_tokens = (
            least_tokens if least_tokens is not None else self._cutter.window_tokens
        )
        self._most_tokens = most_tokens
        self._owners = owners
        self._secret = secret if secret is not None else os.urandom(16)
        self._lock = threading.Lock()
        self._block_tokens = 0
        self._table: SpanTable | None = None

    @property
    def certain_tokens(self) -> int:
        """Every cached run of so many tokens is found, as long as no limit was reached."""
        return max(self._cutter.certain_tokens, self._least_tokens)

    def store(
        self,
        keys: Sequence[Key],
        tokens: Sequence[int] | Tokens,
        block_tokens: int,
        *,
        scope: bytes,
        first_block: int = 0,
        parent: Key | None = None,
    ) -> int:
        """Registers consecutive blocks of a stored sequence; returns how many of them are new.

        What is known already costs little, so a longer sequence may be stored whole again. Tokens
        behind the last whole block are ignored. Do not store blocks whose KV depends on more than
        their tokens (images, audio): a placeholder's tokens are the same for every image.

        Args:
            keys: of the blocks, `keys[0]` being block number `first_block` of its sequence.
            tokens: of the same blocks: `tokens[0]` is the first token of `keys[0]`.
            block_tokens: tokens of a block; the same in every call.
            scope: keyspace, tenant salt and LoRA adapter; scopes never find each other's text.
            first_block: 0 if the sequence is given from its beginning.
            parent: the key before `keys[0]`, if there is one: runs go on across that seam.

        Raises:
            ValueError: a key is not 32 bytes or comes twice, or `block_tokens` differs from
                earlier calls'.
            OverflowError: a token is no u32.
        """
        known = as_tokens(tokens)
        place, seed = self._place(scope)
        if block_tokens < 1 or first_block < 0:
            raise ValueError("a block has at least 1 token, and the first one is number 0")
        blocks = min(len(keys), len(known) // block_tokens)
        keys, known = keys[:blocks], known[: blocks * block_tokens]
        if not blocks:
            return 0
        with self._lock:
            table = self._table_of(block_tokens)
            context = self._cutter.context_tokens
            # Marks of blocks that are known are known; those across the first seam are not.
            done = table.known(keys, known, first_block, place, parent) * block_tokens
            begin = max(0, done - context)
            text, at = known[begin:], begin
            if begin == 0 and parent is not None:
                before = np.frombuffer(table.tail(parent, place, context), np.uint32)
                text, at = np.concatenate([before, known]), -len(before)
            if done == len(known):
                marks = Marks(np.empty(0, np.int64), np.empty(0, np.uint64))
            else:
                marks = self._cut(text, seed)
            return table.put(
                keys, known, first_block, place, parent, marks.ends + at, marks.fingerprints
            )

    def find(
        self, tokens: Sequence[int] | Tokens, *, scope: bytes, skip_tokens: int = 0
    ) -> list[FoundSpan]:
        """The runs of a prompt that are cached, in order; they may overlap.

        Of text that is stored in several places a few (`ALTERNATIVES`) are given.

        Args:
            tokens: the prompt.
            scope: as in `store`.
            skip_tokens: the prompt's first tokens are found already, as a prefix.

        Raises:
            OverflowError: a token is no u32.
        """
        skip = max(0, skip_tokens)
        prompt = as_tokens(tokens)[skip:]
        place, seed = self._place(scope)
        with self._lock:
            table = self._table
            if table is None or not len(table):
                return []
            marks = self._cut(prompt, seed)
            found = table.find(
                prompt,
                marks.ends,
                marks.fingerprints,
                place,
                self._least_tokens,
                ALTERNATIVES,
                _BUDGET_RATIO * len(prompt) + _BUDGET_TOKENS,
            )
            return [
                FoundSpan(start + skip, stop + skip, source, held, self._block_tokens)
                for start, stop, source, held in found
            ]

    def forget(self, keys: Iterable[Key]) -> int:
        """Removes blocks, as when the store has lost them; returns how many were known."""
        with self._lock:
            return self._table.drop(list(keys)) if self._table is not None else 0

    def clear(self) -> None:
        """Removes every block."""
        with self._lock:
            if self._table is not None:
                self._table.clear()

    def stats(self) -> SpanStats:
        """What it holds now."""
        with self._lock:
            table = self._table
            if table is None:
                return SpanStats()
            return SpanStats(
                blocks=len(table),
                tokens=len(table) * self._block_tokens,
                marks=table.marks,
                memory_bytes=table.memory_bytes,
                evicted_blocks=table.evicted_blocks,
                crowded_marks=table.crowded_marks,
                curtailed_lookups=table.curtailed_lookups,
            )

    def _table_of(self, block_tokens: int) -> SpanTable:
        if self._table is None:
            most_blocks = max(1, self._most_tokens // block_tokens)
            self._table = SpanTable(block_tokens, most_blocks, self._owners)
            self._block_tokens = block_tokens
        elif block_tokens != self._block_tokens:
            raise ValueError(
                f"blocks of {block_tokens} tokens in an index of blocks of {self._block_tokens}"
            )
        return self._table

    def _place(self, scope: bytes) -> tuple[bytes, int]:
        """A scope's name in the table, and the seed of its fingerprints."""
        digested = digest(self._secret + scope)
        return digested[:16], int.from_bytes(digested[16:24], "little")
