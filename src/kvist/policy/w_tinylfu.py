"""W-TinyLFU: a small window before a segmented main area that a newcomer must win a place in.

The window is one per cent, in order of last use. What it would evict is compared with the main
area's victim by how often each was seen; the rarer goes. Main is probation (first stay) and
protected (used again there; at most 80 %). Counts are exact and halve every ten capacities.

Source: Einziger, Friedman and Manes, TinyLFU, ACM TOS 2017, section 4. Theirs counts in a sketch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvist.core.keys import Key
from kvist.policy.order import Queue, in_turn

_WINDOW_SHARE = 0.01
_PROTECTED_SHARE = 0.8
_MOST_USES = 15
_AGING_CAPACITIES = 10


class WTinyLfu:
    """Evicts the rarer of the window's and the main area's coldest."""

    def __init__(self, capacity_blocks: int) -> None:
        """`capacity_blocks` sizes the areas; it is not enforced."""
        self._window_blocks = max(1, int(capacity_blocks * _WINDOW_SHARE))
        main_blocks = max(1, capacity_blocks - self._window_blocks)
        self._main_blocks = main_blocks
        self._protected_blocks = max(1, int(main_blocks * _PROTECTED_SHARE))
        self._aging_uses = max(64, _AGING_CAPACITIES * capacity_blocks)
        self._window: Queue = OrderedDict()
        self._probation: Queue = OrderedDict()
        self._protected: Queue = OrderedDict()
        self._resident: set[Key] = set()
        self._counts: dict[Key, int] = {}
        self._seen = 0

    def insert(self, key: Key, parent: Key | None) -> None:
        """Adds `key` to the window; a key that is present is touched."""
        if key in self._resident:
            self.touch(key)
            return
        self._count(key)
        self._resident.add(key)
        self._window[key] = None
        while (
            len(self._window) > self._window_blocks
            and len(self._probation) + len(self._protected) < self._main_blocks
        ):
            self._probation[self._window.popitem(last=False)[0]] = None

    def touch(self, key: Key) -> None:
        """Counts a use and moves `key` up."""
        if key not in self._resident:
            return
        self._count(key)
        if key in self._window:
            self._window.move_to_end(key)
        elif key in self._protected:
            self._protected.move_to_end(key)
        else:
            del self._probation[key]
            self._protected[key] = None
            if len(self._protected) > self._protected_blocks:
                self._probation[self._protected.popitem(last=False)[0]] = None

    def remove(self, key: Key) -> None:
        """Forgets `key`, but not how often it was seen."""
        if key in self._resident:
            self._resident.discard(key)
            for area in (self._window, self._probation, self._protected):
                area.pop(key, None)

    def victims(self) -> Iterator[Key]:
        """The loser of each comparison while it is removed; after a skip area by area."""
        return in_turn(self._choose, self._resident, self._window, self._probation, self._protected)

    def _choose(self) -> Key | None:
        settled = next(iter(self._probation), None) or next(iter(self._protected), None)
        candidate = next(iter(self._window), None)
        if settled is None or candidate is None:
            return candidate or settled
        if len(self._window) < self._window_blocks:
            return settled
        # If the candidate wins, the next insertion moves it to the place that becomes free.
        wins = self._counts.get(candidate, 0) > self._counts.get(settled, 0)
        return settled if wins else candidate

    def _count(self, key: Key) -> None:
        self._counts[key] = min(_MOST_USES, self._counts.get(key, 0) + 1)
        self._seen += 1
        if self._seen >= self._aging_uses:
            self._counts = {k: n // 2 for k, n in self._counts.items() if n > 1}
            self._seen //= 2

    def __len__(self) -> int:
        return len(self._resident)
