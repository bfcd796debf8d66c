"""Insert filters: may a block enter a tier that costs something to write?"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from kvist.core.keys import Key
from kvist.policy.order import Queue


class InsertFilter(Protocol):
    """Decides on entry only; holds no blocks. Not thread-safe: the owner's lock guards it."""

    def admits(self, key: Key) -> bool:
        """Whether `key`, which is absent, may enter now; being asked counts as being seen."""
        ...


class AdmitAll:
    """Lets everything in: the null filter."""

    def admits(self, key: Key) -> bool:
        """True."""
        return True


class SecondSight:
    """Lets in what was asked for before: most blocks of real traffic are never used again."""

    def __init__(self, remembered_blocks: int) -> None:
        """`remembered_blocks` bounds the memory; the key seen longest ago is forgotten first."""
        self._remembered_blocks = max(1, remembered_blocks)
        self._seen: Queue = OrderedDict()

    def admits(self, key: Key) -> bool:
        """Whether `key` was seen before and is still remembered."""
        if key in self._seen:
            self._seen.move_to_end(key)
            return True
        self._seen[key] = None
        if len(self._seen) > self._remembered_blocks:
            self._seen.popitem(last=False)
        return False


class Weighs(Protocol):
    """A policy that can compare a block that is absent with its next victim."""

    def prefers(self, key: Key) -> bool:
        """Whether `key` is worth more than the block that would have to go for it."""
        ...


class ByValue:
    """Lets in what its policy would not evict at once."""

    def __init__(self, policy: Weighs) -> None:
        self._policy = policy

    def admits(self, key: Key) -> bool:
        """What the policy prefers."""
        return self._policy.prefers(key)
