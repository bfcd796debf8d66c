"""One lookup in the index of cached text in Python: the specification of `span_find.hpp`."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

# start and stop in the prompt, position at which it is stored, keys of the blocks that hold it
Found = tuple[int, int, int, tuple[bytes, ...]]

MOST_CHILDREN = 32  # tried where a run goes on behind a block
_TOKEN_BYTES = 4


class Block:
    """A block in its tree."""

    __slots__ = ("children", "key", "marks", "number", "parent", "scope", "text", "tokens")

    def __init__(
        self, key: bytes, number: int, scope: bytes, tokens: npt.NDArray[np.uint32]
    ) -> None:
        self.key = key
        self.number = number
        self.scope = scope
        self.tokens = array("I", tokens.tobytes())
        self.text = tokens.tobytes()
        self.parent: Block | None = None
        self.children: dict[Block, None] = {}  # newest last
        self.marks: list[tuple[int, int]] = []  # fingerprint, offset


# start and stop in the prompt, position at which it is stored, its blocks
Run = tuple[int, int, int, list[Block]]


class Prompt:
    """A prompt, as single tokens and as bytes, to compare with what is stored."""

    def __init__(self, tokens: npt.NDArray[np.uint32]) -> None:
        self.tokens = tokens.tolist()
        self.text = tokens.tobytes()

    def agrees_back(self, at: int, block: Block, offset: int) -> int:
        """How many tokens agree, from prompt `at` and the block's `offset` backwards."""
        most = min(at, offset) + 1
        text = self.text[(at - most + 1) * _TOKEN_BYTES : (at + 1) * _TOKEN_BYTES]
        if text == block.text[(offset - most + 1) * _TOKEN_BYTES : (offset + 1) * _TOKEN_BYTES]:
            return most
        count = 0
        while self.tokens[at - count] == block.tokens[offset - count]:
            count += 1
        return count

    def agrees_on(self, at: int, block: Block, offset: int) -> int:
        """How many tokens agree, from prompt `at` and the block's `offset` on."""
        most = min(len(self.tokens) - at, len(block.tokens) - offset)
        text = self.text[at * _TOKEN_BYTES : (at + most) * _TOKEN_BYTES]
        if text == block.text[offset * _TOKEN_BYTES : (offset + most) * _TOKEN_BYTES]:
            return most
        count = 0
        while self.tokens[at + count] == block.tokens[offset + count]:
            count += 1
        return count

    def run_around(self, end: int, block: Block, offset: int) -> Run:
        """The whole run around a token: start, stop, place where it is stored, its blocks."""
        size = len(block.tokens)
        back = self.agrees_back(end, block, offset)
        if not back:
            return end, end, block.number * size + offset, []
        path = [block]
        at, first, left = end - back, block, offset - back
        while left < 0 and at >= 0 and first.parent is not None:
            back = self.agrees_back(at, first.parent, size - 1)
            if not back:
                break
            first = first.parent
            path.append(first)
            at, left = at - back, size - 1 - back
        path.reverse()
        start, source = at + 1, first.number * size + left + 1
        stop, last, right = end + 1, block, offset + 1
        while True:
            count = self.agrees_on(stop, last, right)
            stop, right = stop + count, right + count
            if right < size or stop == len(self.tokens):
                return start, stop, source, path
            child = self._continuation(stop, last)
            if child is None:
                return start, stop, source, path
            last, right = child, 0
            path.append(child)

    def _continuation(self, at: int, block: Block) -> Block | None:
        """The child that agrees longest with the prompt; None if none agrees at all."""
        best, longest = None, 0
        for tried, child in enumerate(reversed(block.children)):
            if tried == MOST_CHILDREN:
                break
            count = self.agrees_on(at, child, 0)
            if count > longest:
                best, longest = child, count
        return best


def chosen(runs: list[Run], tokens: int, alternatives: int) -> list[Found]:
    """Without those that enough longer ones cover, in order of the prompt."""
    cover = np.zeros(tokens, np.int32)
    kept = []
    for number in sorted(range(len(runs)), key=lambda n: (runs[n][0] - runs[n][1], n)):
        part = cover[runs[number][0] : runs[number][1]]
        if part.min() < alternatives:
            part += 1
            kept.append(number)
    kept.sort(key=lambda n: (runs[n][0], -runs[n][1], n))
    return [
        (start, stop, source, tuple(block.key for block in path))
        for start, stop, source, path in (runs[n] for n in kept)
    ]
