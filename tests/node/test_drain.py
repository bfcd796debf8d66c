"""A node that ends writes what is not below yet, and lets go in the right order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from node_process import attach, eventually

from kvist.core.events import KvEvent
from kvist.node import control
from kvist.node.client import NodeStore
from kvist.node.daemon import serve
from kvist.node.keyspaces import Attach
from kvist.node.place import NodeLock, Place
from kvist.policy import LeafLru
from kvist.store import TieredStore
from kvist.testing.store_suite import WAIT_S, DictTier, content, key, put
from kvist.tiers.dram import PAGE_BYTES, Arena


def test_drain_writes_what_is_dirty_before_it_lets_go_of_the_lock(folder: Path) -> None:
    """The tier below is slow: nothing has been written when the node is told to end."""
    tier = DictTier()
    tier.open.clear()
    place = Place(folder / "n.sock")

    def open_store(attach: Attach, on_event: Callable[[KvEvent], None]) -> TieredStore:
        arena = Arena(8 * PAGE_BYTES, slot_bytes=attach.block_bytes)
        return TieredStore(arena, LeafLru(), tier, raw_bytes=attach.block_bytes, stuck_s=60.0)

    node = threading.Thread(target=serve, args=(place, lambda lends: open_store), kwargs=LIMITS)
    node.start()
    eventually(lambda: control.listens(place.socket))
    with NodeStore(place.socket, attach(1)) as store:
        assert all(put(store, range(4)))
        assert tier.blocks == {}
        assert control.ask(place.socket, "drain") == {"draining": True}
        eventually(lambda: not store.attached)
        eventually(lambda: not place.socket.exists())
        assert node.is_alive()
        tier.open.set()
        NodeLock(place, wait_s=WAIT_S).release()
        assert tier.blocks == {key(n): content(key(n)) for n in range(4)}
        assert tier.closed
        node.join(WAIT_S)
        assert not node.is_alive()


LIMITS = {"keyspaces": 1, "drain_s": WAIT_S}
