"""LIRS: keeps what has a short distance between its last two uses.

The stack S orders keys by last use and also remembers some that were evicted. Keys with a short
distance (LIR) own 99 % of the room; the others (HIR) pass through the queue Q and are the victims.
A HIR key used again while it is in S has proved a shorter distance than the LIR key at the bottom
of S, and they change places. The bottom of S is always LIR.

Source: Jiang and Zhang, LIRS, SIGMETRICS'02, section 3. Ghosts in S are at most two capacities.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvist.core.keys import Key
from kvist.policy.order import Queue, in_turn

_PASSING_SHARE = 0.01
_GHOST_CAPACITIES = 2


class Lirs:
    """Evicts the front of Q; without one, the LIR key used longest ago."""

    def __init__(self, capacity_blocks: int) -> None:
        """`capacity_blocks` sizes the LIR part and the ghosts; it is not enforced."""
        passing = max(1, int(capacity_blocks * _PASSING_SHARE))
        self._lasting_blocks = max(1, capacity_blocks - passing)
        self._ghost_blocks = max(1, _GHOST_CAPACITIES * capacity_blocks)
        self._stack: Queue = OrderedDict()  # S; the bottom stands first
        self._lasting: Queue = OrderedDict()  # LIR, in order of last use as in S
        self._passing: Queue = OrderedDict()  # Q: resident HIR
        self._ghosts: Queue = OrderedDict()  # in S, not resident
        self._resident: set[Key] = set()

    def insert(self, key: Key, parent: Key | None) -> None:
        """Adds `key`: LIR if there is room or S remembers it; a key that is present is touched."""
        if key in self._resident:
            self.touch(key)
            return
        self._resident.add(key)
        remembered = key in self._ghosts
        self._ghosts.pop(key, None)
        self._raise(key)
        if remembered or len(self._lasting) < self._lasting_blocks:
            self._lasting[key] = None
            self._balance()
        else:
            self._passing[key] = None

    def touch(self, key: Key) -> None:
        """Moves `key` to the top of S; a HIR key that was in S becomes LIR."""
        if key in self._lasting:
            self._raise(key)
            self._lasting.move_to_end(key)
            self._prune()
        elif key in self._passing:
            known = key in self._stack
            self._raise(key)
            if known:
                del self._passing[key]
                self._lasting[key] = None
                self._balance()
            else:
                self._passing.move_to_end(key)

    def remove(self, key: Key) -> None:
        """Takes `key` out; a HIR key that is in S stays there as a ghost."""
        if key not in self._resident:
            return
        self._resident.discard(key)
        if key in self._lasting:
            del self._lasting[key]
            del self._stack[key]
            self._prune()
            return
        del self._passing[key]
        if key in self._stack:
            self._ghosts[key] = None
            if len(self._ghosts) > self._ghost_blocks:
                del self._stack[self._ghosts.popitem(last=False)[0]]

    def victims(self) -> Iterator[Key]:
        """Q from its front, then LIR keys from the coldest."""
        return in_turn(self._choose, self._resident, self._passing, self._lasting)

    def _choose(self) -> Key | None:
        return next(iter(self._passing), None) or next(iter(self._lasting), None)

    def _raise(self, key: Key) -> None:
        self._stack[key] = None
        self._stack.move_to_end(key)

    def _balance(self) -> None:
        """Too many LIR keys: the one at the bottom becomes HIR and leaves S."""
        while len(self._lasting) > self._lasting_blocks:
            coldest = self._lasting.popitem(last=False)[0]
            del self._stack[coldest]
            self._passing[coldest] = None
        self._prune()

    def _prune(self) -> None:
        """Takes keys from the bottom of S until a LIR key is there."""
        while self._stack:
            bottom = next(iter(self._stack))
            if bottom in self._lasting:
                return
            del self._stack[bottom]
            self._ghosts.pop(bottom, None)

    def __len__(self) -> int:
        return len(self._resident)
