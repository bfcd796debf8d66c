"""Every message once, with values that never change: what golden bytes and fuzzing begin with."""

from __future__ import annotations

from kvist.node import messages as m
from kvist.node.protocol import join_keys, pack_slots
from kvist.testing.store_suite import RAW_BYTES, key

KEYS = join_keys([key(n) for n in range(3)])
PARENTS = join_keys([key(0), key(0), key(1)])

FIRSTS: tuple[m.First, ...] = (
    m.Hello("kvist", 1, 1, 4711, "engine", bytes(range(32)), "a block", RAW_BYTES, True),
    m.Control("kvist", 1, 1, "status"),
)
REQUESTS: tuple[m.Request, ...] = (
    m.Match(1, KEYS),
    m.Read(2, KEYS, 1.5, "tenant"),
    m.Write(3, KEYS, PARENTS, (0,), ("tenant",)),
    m.Commit(4, 2, (0, 1), (None, 2**64 - 1)),
    m.Release(1),
    m.Release(2),
    m.Prefetch(5, KEYS, 0.5, ""),
    m.Ended(KEYS, 1, 100, None),
    m.Ended(KEYS, 2, None, key(7)),
    m.Room(6, "tenant"),
    m.Totals(7),
    m.Evict(8, KEYS),
    m.Clear(9),
    m.Flush(10, 0.0),
    m.Stats(11),
)
REPLIES: tuple[m.Reply, ...] = (
    m.Welcome(1, 42, 3, 1 << 30, 1 << 21, 2_000_000),
    m.Refused("this node belongs to another user", True),
    m.Report('{"pid":42}'),
    m.Matched(1, bytes([1, 1, 2])),
    m.Leased(2, 1, bytes([m.HIT, m.PENDING, m.MISS]), pack_slots([5, m.NO_SLOT, m.NO_SLOT])),
    m.Settled(1, (1,), bytes([m.HIT]), pack_slots([6])),
    m.Reserved(3, 2, pack_slots([0, 1, m.NO_SLOT])),
    m.Committed(4, bytes([1, 0])),
    m.Count(5, 7),
    m.TierTotals(7, ((2, 1 << 40, 0.25),)),
    m.Shown(11, "{}"),
    m.Failed(3, "NoSpaceError", "3 slots asked for, 1 can be had"),
    m.Events("stored", KEYS, key(9), 2),
    m.Goodbye("drained"),
)
