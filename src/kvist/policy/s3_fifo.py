"""S3-FIFO: a small queue for newcomers, a main queue for what was used again, and ghosts.

A tenth of the capacity is the small queue. What leaves it without a second use goes, and is
remembered as a ghost; what comes back while it is remembered enters the main queue directly.

Source: Yang et al., FIFO Queues are All You Need for Cache Eviction, SOSP'23, algorithm 1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvist.core.keys import Key
from kvist.policy.order import Queue, in_turn

_SMALL_SHARE = 0.1
_MOST_USES = 3
_PROMOTED_AT_USES = 2


class S3Fifo:
    """Evicts from the small queue while it is over its share, else from the main queue."""

    def __init__(self, capacity_blocks: int) -> None:
        """`capacity_blocks` sizes the small queue and the ghosts; it is not enforced."""
        self._small_blocks = max(1, int(capacity_blocks * _SMALL_SHARE))
        self._ghost_blocks = max(1, capacity_blocks - self._small_blocks)
        self._small: Queue = OrderedDict()
        self._main: Queue = OrderedDict()
        self._ghosts: Queue = OrderedDict()
        self._uses: dict[Key, int] = {}  # of present keys, after the first; at most 3

    def insert(self, key: Key, parent: Key | None) -> None:
        """Adds `key` to the small queue, a ghost to the main one; touches a key that is present."""
        if key in self._uses:
            self.touch(key)
            return
        self._uses[key] = 0
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = None
        else:
            self._small[key] = None

    def touch(self, key: Key) -> None:
        """Counts a use."""
        uses = self._uses.get(key, _MOST_USES)
        if uses < _MOST_USES:
            self._uses[key] = uses + 1

    def remove(self, key: Key) -> None:
        """Forgets `key`; from the small queue it becomes a ghost."""
        if self._uses.pop(key, None) is None:
            return
        if key in self._main:
            del self._main[key]
            return
        del self._small[key]
        self._ghosts[key] = None
        if len(self._ghosts) > self._ghost_blocks:
            self._ghosts.popitem(last=False)

    def victims(self) -> Iterator[Key]:
        """The algorithm's choice while each is removed; after a skip both queues in order."""
        return in_turn(self._choose, self._uses, self._small, self._main)

    def _choose(self) -> Key | None:
        while self._uses:
            if self._small and (len(self._small) >= self._small_blocks or not self._main):
                key = next(iter(self._small))
                if self._uses[key] < _PROMOTED_AT_USES:
                    return key
                del self._small[key]
                self._main[key] = None
                self._uses[key] = 0
                continue
            key = next(iter(self._main))
            if not self._uses[key]:
                return key
            self._uses[key] -= 1
            self._main.move_to_end(key)
        return None

    def __len__(self) -> int:
        return len(self._uses)
