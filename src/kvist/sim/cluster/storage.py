"""The store of a simulated node: DRAM that a crash empties, an SSD that it does not.

A block's content says whose it is, so a reader can tell a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable

from kvist.core.events import Cleared, KvEvent, Removed, Stored
from kvist.core.keys import Key
from kvist.core.outcome import Tier

Tell = Callable[[KvEvent], None]


def content_of(key: Key) -> bytes:
    """What the block of a key holds, whoever computed it."""
    return b"KV of " + key


class Storage:
    """Two tiers in the order of use. What DRAM evicts goes to SSD, what that evicts is gone."""

    def __init__(self, dram_blocks: int, ssd_blocks: int) -> None:
        self._dram_blocks = dram_blocks
        self._ssd_blocks = ssd_blocks
        self._dram: dict[Key, bytes] = {}
        self._ssd: dict[Key, bytes] = {}
        self._parents: dict[Key, Key | None] = {}

    @property
    def capacity_blocks(self) -> int:
        """Blocks that fit in."""
        return self._dram_blocks + self._ssd_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that can be taken without losing one."""
        return self._dram_blocks + self._ssd_blocks - len(self._dram) - len(self._ssd)

    def tiers(self) -> dict[Key, frozenset[Tier]]:
        """What is where: the truth that indexes are measured by."""
        both = frozenset((Tier.DRAM, Tier.SSD))
        found = dict.fromkeys(self._ssd, frozenset((Tier.SSD,)))
        for key in self._dram:
            found[key] = both if key in found else frozenset((Tier.DRAM,))
        return found

    def __contains__(self, key: Key) -> bool:
        return key in self._dram or key in self._ssd

    def get(self, key: Key) -> bytes | None:
        """A block's content; it is then the last to go."""
        if key in self._dram:
            content = self._dram[key] = self._dram.pop(key)
            return content
        return self._ssd.get(key)

    def parent(self, key: Key) -> Key | None:
        """The block before it in its sequence, if it has one."""
        return self._parents.get(key)

    def put(self, key: Key, parent: Key | None, content: bytes, tell: Tell) -> None:
        """Takes a block into DRAM; the first writer wins."""
        if key in self._dram:
            return
        while len(self._dram) >= self._dram_blocks:
            self._demote(tell)
        self._dram[key] = content
        self._parents[key] = parent
        tell(Stored((key,), parent, Tier.DRAM))

    def clear(self, tell: Tell) -> None:
        """Forgets everything."""
        self._dram.clear()
        self._ssd.clear()
        self._parents.clear()
        tell(Cleared())

    def crash(self) -> None:
        """DRAM is empty, and nobody is told."""
        self._dram.clear()
        self._parents = {key: self._parents[key] for key in self._ssd}

    def announce(self, tell: Tell) -> None:
        """What a node says at its start of the blocks that it found."""
        for key in self._ssd:
            tell(Stored((key,), self._parents[key], Tier.SSD))

    def _demote(self, tell: Tell) -> None:
        key = next(iter(self._dram))
        content = self._dram.pop(key)
        if key not in self._ssd and self._ssd_blocks:
            if len(self._ssd) >= self._ssd_blocks:
                self._drop_oldest(tell)
            self._ssd[key] = content
            tell(Stored((key,), self._parents[key], Tier.SSD))
        tell(Removed((key,), Tier.DRAM))
        self._forget(key)

    def _drop_oldest(self, tell: Tell) -> None:
        key = next(iter(self._ssd))
        del self._ssd[key]
        tell(Removed((key,), Tier.SSD))
        self._forget(key)

    def _forget(self, key: Key) -> None:
        if key not in self:
            del self._parents[key]
