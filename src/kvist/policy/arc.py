"""ARC: two lists by one use and by several, whose balance follows hits on their ghosts.

T1 holds keys used once, T2 the others; B1 and B2 remember what was evicted from each. A hit in B1
says that T1 should have been larger and raises its target size p; one in B2 lowers it.

Source: Megiddo and Modha, ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST'03, figure 4.
The lists are cut back after an insertion, not before a replacement: the same keys remain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvist.core.keys import Key
from kvist.policy.order import Queue, in_turn


class Arc:
    """Evicts from T1 while it is above its target, else from T2."""

    def __init__(self, capacity_blocks: int) -> None:
        """`capacity_blocks` bounds the ghosts and the target; it is not enforced."""
        self._capacity_blocks = max(1, capacity_blocks)
        self._once: Queue = OrderedDict()  # T1
        self._often: Queue = OrderedDict()  # T2
        self._once_ghosts: Queue = OrderedDict()  # B1
        self._often_ghosts: Queue = OrderedDict()  # B2
        self._target_blocks = 0.0  # p
        self._resident: set[Key] = set()
        self._expected: Key | None = None

    def expect(self, key: Key) -> None:
        """Adapts the target to a coming key, before the victims for it are asked for."""
        once, often = len(self._once_ghosts), len(self._often_ghosts)
        if key in self._once_ghosts:
            wider = self._target_blocks + max(1.0, often / once)
            self._target_blocks = min(wider, float(self._capacity_blocks))
        elif key in self._often_ghosts:
            self._target_blocks = max(self._target_blocks - max(1.0, once / often), 0.0)
        self._expected = key

    def insert(self, key: Key, parent: Key | None) -> None:
        """Adds `key` to T1, a ghost to T2; a key that is present is touched."""
        if key in self._resident:
            self.touch(key)
            return
        if self._expected != key:
            self.expect(key)
        self._expected = None
        self._resident.add(key)
        if key in self._once_ghosts or key in self._often_ghosts:
            self._once_ghosts.pop(key, None)
            self._often_ghosts.pop(key, None)
            self._often[key] = None
        else:
            self._once[key] = None
        self._trim()

    def touch(self, key: Key) -> None:
        """Makes `key` the most recent of T2."""
        if key in self._often:
            self._often.move_to_end(key)
        elif key in self._once:
            del self._once[key]
            self._often[key] = None

    def remove(self, key: Key) -> None:
        """Makes a ghost of `key`."""
        if key not in self._resident:
            return
        self._resident.discard(key)
        if key in self._once:
            del self._once[key]
            self._once_ghosts[key] = None
        else:
            del self._often[key]
            self._often_ghosts[key] = None

    def victims(self) -> Iterator[Key]:
        """The algorithm's choice while each is removed; after a skip T1, then T2."""
        return in_turn(self._choose, self._resident, self._once, self._often)

    def _choose(self) -> Key | None:
        once = len(self._once)
        if once and (not self._often or self._once_is_over(once)):
            return next(iter(self._once))
        return next(iter(self._often), None)

    def _once_is_over(self, once: int) -> bool:
        if self._expected in self._often_ghosts and once == self._target_blocks:
            return True
        return once > self._target_blocks

    def _trim(self) -> None:
        capacity = self._capacity_blocks
        while self._once_ghosts and len(self._once) + len(self._once_ghosts) > capacity:
            self._once_ghosts.popitem(last=False)
        ghosts = len(self._once_ghosts) + len(self._often_ghosts)
        while self._often_ghosts and len(self._resident) + ghosts > 2 * capacity:
            self._often_ghosts.popitem(last=False)
            ghosts -= 1

    def __len__(self) -> int:
        return len(self._resident)
