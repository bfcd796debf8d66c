"""The index of cached text in Python: the specification of `_core.SpanTable`.

Blocks form trees: a block's parent is the block before it in its sequence. A *mark* says that the
window of tokens which ends at some token of a block has some fingerprint; several blocks may own
marks of one fingerprint. A fingerprint is only a hint where to look: what is found is a run of
tokens that were compared one by one, from the hinted one to both sides as far as prompt and tree
agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvist.core.keys import KEY_BYTES
from kvist.native.span_find_twin import Block, Found, Prompt, Run, chosen

SCOPE_BYTES = 16
_TOKEN_BYTES = 4


class SpanTable:
    """Fingerprints → the blocks that hold such text, with their tokens. Needs the caller's lock.

    Args:
        block_tokens: tokens of a block.
        most_blocks: above it, the block goes that was put longest ago.
        owners: most marks of one fingerprint; above it, the oldest of them goes.

    Raises:
        ValueError: one of them is below 1.
    """

    def __init__(self, block_tokens: int, most_blocks: int, owners: int) -> None:
        if min(block_tokens, most_blocks, owners) < 1:
            raise ValueError("block_tokens, most_blocks and owners are at least 1")
        self._block_tokens = block_tokens
        self._most_blocks = most_blocks
        self._owners = owners
        self._blocks: dict[bytes, Block] = {}  # oldest first
        self._marks: dict[int, list[tuple[Block, int]]] = {}  # oldest first
        self.marks = 0
        self.evicted_blocks = 0
        self.crowded_marks = 0
        self.curtailed_lookups = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def known(
        self,
        keys: Sequence[bytes],
        tokens: npt.NDArray[np.uint32],
        first_block: int,
        scope: bytes,
        parent: bytes | None,
    ) -> int:
        """How many blocks, from the first on, `put` with the same arguments would leave alone.

        They are present as they are given, and each is linked to the one before it.

        Raises:
            ValueError: a key is not 32 bytes, a scope not 16, or lengths disagree.
        """
        size = self._block_tokens
        self._check(keys, tokens, scope, parent)
        last = self._blocks.get(parent) if parent is not None else None
        for i, key in enumerate(keys):
            block = self._blocks.get(key)
            part = tokens[i * size : (i + 1) * size]
            if block is None or not self._is(block, first_block + i, scope, part):
                return i
            if last is not None and block.parent is not last and self._precedes(last, block):
                return i
            last = block
        return len(keys)

    def tail(self, key: bytes, scope: bytes, tokens: int) -> bytes:
        """The last tokens of the sequence that ends with a block, little-endian u32.

        At most `tokens` of them; fewer where a block before is absent, none if this one is.
        """
        block = self._blocks.get(key)
        parts: list[bytes] = []
        left = tokens
        while block is not None and block.scope == scope and left > 0:
            parts.append(block.text[-left * _TOKEN_BYTES :])
            left -= self._block_tokens
            block = block.parent
        return b"".join(reversed(parts))

    def put(
        self,
        keys: Sequence[bytes],
        tokens: npt.NDArray[np.uint32],
        first_block: int,
        scope: bytes,
        parent: bytes | None,
        ends: npt.NDArray[np.int64],
        fingerprints: npt.NDArray[np.uint64],
    ) -> int:
        """Registers consecutive blocks of a sequence; returns how many of them are new.

        Blocks that are known become the youngest. One that is known with other tokens, at another
        place or in another scope is replaced.

        Args:
            keys: of the blocks; beyond `most_blocks` they are left out.
            tokens: `[keys * block_tokens]`.
            first_block: number of the first block in its sequence.
            scope: 16 bytes; blocks of different scopes have nothing to do with each other.
            parent: the block before the first one; None if there is none, or it is not cached.
            ends: where the marks are, counted from the first of `tokens`; negative ones stand in
                the blocks before, and are left out where those are absent.
            fingerprints: one for each mark.

        Raises:
            ValueError: a key is not 32 bytes or comes twice, a scope is not 16 bytes, or lengths
                disagree; nothing was put.
        """
        size = self._block_tokens
        self._check(keys, tokens, scope, parent)
        if len(ends) != len(fingerprints):
            raise ValueError("keys and tokens, or marks and fingerprints, do not fit together")
        if len(set(keys)) != len(keys):
            raise ValueError("a key comes twice")
        keys = keys[: self._most_blocks]
        self._make_room(keys)
        before = self._blocks.get(parent) if parent is not None else None
        last, blocks, new = before, [], 0
        for i, key in enumerate(keys):
            part = tokens[i * size : (i + 1) * size]
            block = self._blocks.get(key)
            if block is not None and not self._is(block, first_block + i, scope, part):
                self.drop([key])
                last = None if block is last else last
                before = None if block is before else before
                block = None
            if block is None:
                block = self._blocks[key] = Block(key, first_block + i, scope, part)
                new += 1
            if block.parent is None and last is not None and self._precedes(last, block):
                block.parent = last
                last.children[block] = None
            blocks.append(block)
            last = block
        self._mark(blocks, before, scope, ends, fingerprints)
        return new

    def _check(
        self,
        keys: Sequence[bytes],
        tokens: npt.NDArray[np.uint32],
        scope: bytes,
        parent: bytes | None,
    ) -> None:
        if any(len(key) != KEY_BYTES for key in (*keys, *([parent] if parent is not None else ()))):
            raise ValueError("a key is 32 bytes")
        if len(scope) != SCOPE_BYTES:
            raise ValueError("a scope is 16 bytes")
        if len(tokens) != len(keys) * self._block_tokens:
            raise ValueError("keys and tokens, or marks and fingerprints, do not fit together")

    def _make_room(self, keys: Sequence[bytes]) -> None:
        missing = 0
        for key in keys:
            block = self._blocks.pop(key, None)
            if block is None:
                missing += 1
            else:
                self._blocks[key] = block
        for _ in range(min(len(self._blocks), len(self._blocks) + missing - self._most_blocks)):
            self.drop([next(iter(self._blocks))])
            self.evicted_blocks += 1

    @staticmethod
    def _is(block: Block, number: int, scope: bytes, tokens: npt.NDArray[np.uint32]) -> bool:
        return (block.number, block.scope, block.text) == (number, scope, tokens.tobytes())

    @staticmethod
    def _precedes(parent: Block, child: Block) -> bool:
        return parent.scope == child.scope and parent.number + 1 == child.number

    def _mark(
        self,
        blocks: list[Block],
        before: Block | None,
        scope: bytes,
        ends: npt.NDArray[np.int64],
        fingerprints: npt.NDArray[np.uint64],
    ) -> None:
        for end, fingerprint in zip(ends.tolist(), fingerprints.tolist(), strict=True):
            number, offset = divmod(end, self._block_tokens)
            if number >= len(blocks):
                continue
            block = blocks[number] if number >= 0 else before
            for _ in range(-number - 1):
                block = block.parent if block is not None else None
            if block is None or block.scope != scope:
                continue
            owners = self._marks.setdefault(fingerprint, [])
            if (block, offset) in owners:
                continue
            if len(owners) == self._owners:
                oldest, at = owners.pop(0)
                oldest.marks.remove((fingerprint, at))
                self.crowded_marks += 1
                self.marks -= 1
            owners.append((block, offset))
            block.marks.append((fingerprint, offset))
            self.marks += 1

    def drop(self, keys: Sequence[bytes]) -> int:
        """Forgets blocks with their marks; returns how many of them were known."""
        dropped = 0
        for key in keys:
            block = self._blocks.pop(key, None)
            if block is None:
                continue
            dropped += 1
            for fingerprint, offset in block.marks:
                owners = self._marks[fingerprint]
                owners.remove((block, offset))
                if not owners:
                    del self._marks[fingerprint]
            self.marks -= len(block.marks)
            if block.parent is not None:
                del block.parent.children[block]
            for child in block.children:
                child.parent = None
        return dropped

    def clear(self) -> None:
        """Forgets every block; counters stay."""
        self._blocks.clear()
        self._marks.clear()
        self.marks = 0

    def find(
        self,
        tokens: npt.NDArray[np.uint32],
        ends: npt.NDArray[np.int64],
        fingerprints: npt.NDArray[np.uint64],
        scope: bytes,
        least_tokens: int,
        alternatives: int,
        budget_tokens: int,
    ) -> list[Found]:
        """The runs of a prompt that are stored, from the first on; of equal starts the longest.

        Args:
            tokens: the prompt.
            ends: its marks, ascending.
            fingerprints: one for each mark.
            scope: where to look.
            least_tokens: shorter runs are not worth it.
            alternatives: a run is left out where so many longer ones cover all of it.
            budget_tokens: after so many compared tokens the lookup ends with what it has.

        Raises:
            ValueError: a mark lies outside the prompt, or lengths disagree.
        """
        if len(ends) != len(fingerprints):
            raise ValueError("marks and fingerprints do not fit together")
        if len(ends) and not 0 <= int(ends.min()) <= int(ends.max()) < len(tokens):
            raise ValueError("a mark lies outside the prompt")
        prompt = Prompt(tokens)
        covered: dict[tuple[Block, int], int] = {}  # block, its place in the prompt → done up to
        runs: list[Run] = []
        compared = 0
        for end, fingerprint in zip(ends.tolist(), fingerprints.tolist(), strict=True):
            for block, offset in reversed(self._marks.get(fingerprint, ())):
                if block.scope != scope or covered.get((block, end - offset), -1) > end:
                    continue
                if compared >= budget_tokens:
                    self.curtailed_lookups += 1
                    return chosen(runs, len(tokens), alternatives)
                start, stop, source, path = prompt.run_around(end, block, offset)
                compared += stop - start + len(path) * self._block_tokens + 1
                for i, each in enumerate(path):
                    place = start - source % self._block_tokens + i * self._block_tokens
                    covered[each, place] = stop
                if path and stop - start >= least_tokens:
                    runs.append((start, stop, source, path))
        return chosen(runs, len(tokens), alternatives)

    @property
    def memory_bytes(self) -> int:
        """A rough estimate of what it takes."""
        return len(self._blocks) * (700 + 8 * self._block_tokens) + self.marks * 300
