"""A node over a tier that never answers a read: `python slow_node.py SOCKET`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from kvist.core.events import KvEvent
from kvist.node.daemon import serve
from kvist.node.keyspaces import Attach
from kvist.node.place import Place
from kvist.policy import LeafLru
from kvist.store import TieredStore
from kvist.testing.store_suite import DictTier, content, key
from kvist.tiers.dram import PAGE_BYTES, Arena

BELOW = range(100, 104)  # blocks that are below, for ever
SLOTS = 8
HANG_S = 300.0


def hanging_store(attach: Attach, on_event: Callable[[KvEvent], None]) -> TieredStore:
    """A store whose tier below holds blocks and hangs."""
    tier = DictTier()
    tier.blocks = {key(n): content(key(n)) for n in BELOW}
    tier.open.clear()
    arena = Arena(SLOTS * PAGE_BYTES, slot_bytes=attach.block_bytes)
    return TieredStore(
        arena, LeafLru(), tier, raw_bytes=attach.block_bytes, stuck_s=HANG_S, events=on_event
    )


if __name__ == "__main__":
    serve(Place(Path(sys.argv[1])), lambda lends: hanging_store, keyspaces=1, drain_s=1.0)
