"""A store as other hosts see it: what they may read, which is what this host has itself.

What this host itself would read from others is never passed on: else two hosts could wait for each
other, and every look-up would wander through all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from kvist.core.keys import Key
from kvist.core.outcome import BlockRef, Tier
from kvist.store import expiry
from kvist.store.desk import Desk
from kvist.store.granting import Granter
from kvist.store.leases import TieredReadLease
from kvist.store.link import LowerLink
from kvist.tiers.protocol import ListedBlock, Lists, Space, TellsSpace


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

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self._desk.table.raw_bytes

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

    def lacks(self, key: Key) -> bool:
        """Whether a block is surely not here: not one that could only not be read just now.

        Raises:
            ClosedError: the store was closed.
        """
        desk, link = self._desk, self._link
        with desk.lock:
            self._demand_open()
            here = key in desk.table.entries or (link is not None and link.holds(key))
            return not here or not expiry.is_live(desk, link, key)

    def fetch(self, blocks: Sequence[BlockRef], *, deadline_s: float) -> int:
        """Wishes for copies of what other hosts have (`prefetch.py`); how many are to be brought.

        Raises:
            ClosedError: the store was closed.
        """
        desk = self._desk
        with desk.lock:
            self._demand_open()
            taken = self._granter.wish(blocks, deadline=desk.clock() + deadline_s)
            desk.load_work.notify(taken)
            return taken

    def tenants(self, keys: Sequence[Key]) -> list[str]:
        """Whose each block is; empty where that is not known."""
        with self._desk.lock:
            return [self._desk.table.owner(key) or "" for key in keys]

    def below(self) -> Iterator[ListedBlock]:
        """The blocks on this host's own medium; what comes or goes meanwhile may be missing.

        Raises:
            TierError: the medium failed.
        """
        link = self._link
        if link is not None and isinstance(link.tier, Lists):
            yield from (b for b in link.tier.list_blocks() if b.own and link.holds(b.key))

    def space(self) -> Mapping[Tier, Space]:
        """How full DRAM is, and this host's own medium below, where it says so."""
        arena, raw_bytes = self._desk.table.arena, self._desk.table.raw_bytes
        used = (arena.capacity_slots - arena.free_slots) * raw_bytes
        found = {Tier.DRAM: Space(used, arena.capacity_slots * raw_bytes)}
        if self._link is not None and isinstance(self._link.tier, TellsSpace):
            below = self._link.tier.space()
            if below is not None:
                found[Tier.SSD] = below
        return found

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
