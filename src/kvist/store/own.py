"""What of a store other hosts may read: blocks in DRAM or on this host's own medium, nothing else.

What this host itself would read from others is never passed on: else two hosts could wait for each
other, and every look-up would wander through all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvist.core.keys import Key
from kvist.store import expiry
from kvist.store.desk import Desk
from kvist.store.granting import Granter
from kvist.store.leases import TieredReadLease
from kvist.store.link import LowerLink


class OwnBlocks:
    """One store as other hosts see it. Thread-safe."""

    def __init__(
        self,
        desk: Desk,
        link: LowerLink | None,
        granter: Granter,
        demand_open: Callable[[], None],
    ) -> None:
        """`demand_open` raises `ClosedError` once the store is closed."""
        self._desk, self._link, self._granter = desk, link, granter
        self._demand_open = demand_open

    def held(self, keys: Sequence[Key]) -> list[bool]:
        """For each key whether it could be read now. No I/O, no use of the block.

        Raises:
            ClosedError: the store was closed.
        """
        desk, link = self._desk, self._link
        with desk.lock:
            self._demand_open()
            below = link if link is not None and link.readable() else None
            return [
                (key in desk.table.resident or (below is not None and below.holds(key)))
                and expiry.is_live(desk, link, key)
                for key in keys
            ]

    def read(self, keys: Sequence[Key], *, deadline_s: float) -> TieredReadLease:
        """Leases `keys` as `BlockStore.read` does.

        Raises:
            NoSpaceError: DRAM cannot hold them all at once now; nothing was reserved.
            ClosedError: the store was closed.
        """
        desk = self._desk
        deadline = desk.clock() + deadline_s
        with desk.lock:
            self._demand_open()
            lease = self._granter.read(keys, deadline=deadline, tenant="", own=True)
        desk.outbox.drain()
        return lease
