"""Whose a block is that has left DRAM and is still below: a frame on a medium names no tenant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvist.core.keys import Key

MOST_BLOCKS = 1 << 18


class Owners:
    """Tenants by key, the newest `most_blocks` of them. Guarded by the store's lock.

    Kept for tenants that have a name; with room for none, for nobody. A block that nobody is known
    to own belongs to the operator alone: that of an older process, or one forgotten for want of
    room.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._tenants: OrderedDict[Key, str] = OrderedDict()
        self.forgotten = 0  # for want of room

    def __len__(self) -> int:
        return len(self._tenants)

    def note(self, key: Key, tenant: str) -> None:
        """A block of `tenant` has left DRAM."""
        if not tenant or not self._most_blocks:
            self._tenants.pop(key, None)
            return
        self._tenants[key] = tenant
        self._tenants.move_to_end(key)
        if len(self._tenants) > self._most_blocks:
            self._tenants.popitem(last=False)
            self.forgotten += 1

    def of(self, key: Key) -> str | None:
        """The tenant of a block that is not in DRAM; `None` if nobody is known."""
        return self._tenants.get(key)

    def forget(self, keys: Iterable[Key]) -> None:
        """Blocks have left every tier."""
        for key in keys:
            self._tenants.pop(key, None)

    def clear(self) -> None:
        """Every block has left every tier."""
        self._tenants.clear()
