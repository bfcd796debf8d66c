"""What a store says of its blocks: lists over tiers, `stat`, and departures from below."""

from collections.abc import Callable
from typing import Any

import pytest

from kvist.core.errors import TierError
from kvist.core.events import KvEvent, Removed
from kvist.core.outcome import Tier
from kvist.store import TieredStore
from kvist.store.entry import State
from kvist.testing.store_suite import WAIT_S, DictTier, content, key, put, ref
from kvist.tiers.memory import MemoryTier

MakeStore = Callable[..., TieredStore]


def test_list_shows_each_tier_and_both(make_store: MakeStore, tier: DictTier) -> None:
    store = make_store()
    tier.blocks[key(9)] = content(key(9))
    put(store, [0])
    assert store.flush(WAIT_S)

    def shown(limit: int, of: Tier | None = None) -> list[tuple[bytes, Tier]]:
        return [(b.key, b.tier) for b in store.list(limit, of)]

    assert shown(9, Tier.DRAM) == [(key(0), Tier.DRAM)]
    assert shown(9, Tier.SSD) == [(key(9), Tier.SSD), (key(0), Tier.SSD)]
    assert shown(9) == [(key(0), Tier.DRAM), (key(9), Tier.SSD), (key(0), Tier.SSD)]
    assert shown(2) == [(key(0), Tier.DRAM), (key(9), Tier.SSD)]
    assert shown(1) == [(key(0), Tier.DRAM)]
    assert shown(9, Tier.REMOTE) == []
    assert make_store(lower=None).list(9, Tier.SSD) == []


def test_a_tier_that_cannot_list_shows_nothing(make_store: MakeStore) -> None:
    store = make_store(lower=MemoryTier(capacity_bytes=1 << 20))
    put(store, [0])
    assert store.flush(WAIT_S)
    assert store.list(9, Tier.SSD) == []
    assert [info.tier for info in store.stat(key(0))] == [Tier.DRAM, Tier.SSD]


def test_a_tier_that_fails_to_list_says_so(make_store: MakeStore) -> None:
    class Failing(DictTier):
        def list_blocks(self) -> Any:
            raise TierError("list: broken")

    store = make_store(lower=Failing())
    assert store.list(9, Tier.DRAM) == []
    with pytest.raises(TierError):
        store.list(9)


def test_stat_says_where_a_block_is(make_store: MakeStore, tier: DictTier) -> None:
    store = make_store()
    put(store, [1])
    assert store.flush(WAIT_S)
    store.pin([key(1)])
    with store.read([key(1)], deadline_s=WAIT_S), store.write([ref(2)]):
        above, below = store.stat(key(1))
        assert store.stat(key(2)) == ()
    assert (above.tier, above.parent, above.refs, above.pinned) == (Tier.DRAM, key(0), 1, True)
    assert above.state is State.CLEAN
    assert (below.tier, below.parent) == (Tier.SSD, key(0))
    tier.blocks[key(9)] = content(key(9))
    assert [info.tier for info in store.stat(key(9))] == [Tier.SSD]
    assert store.stat(key(5)) == ()
    store.close()
    assert store.stat(key(1)) == ()


def test_blocks_that_the_tier_below_evicts_are_told(make_store: MakeStore, tier: DictTier) -> None:
    events: list[KvEvent] = []
    store = make_store(events=events.append)
    tier.most_blocks = 2
    put(store, range(3))
    assert store.flush(WAIT_S)
    store.close()
    gone = [k for e in events if isinstance(e, Removed) and e.tier is Tier.SSD for k in e.keys]
    assert gone == [key(0)]


def test_a_block_evicted_below_and_absent_above_has_no_age_left(
    make_store: MakeStore, tier: DictTier, clock: Any
) -> None:
    store = make_store(blocks=1, ttl_s=10.0, clock=clock)
    tier.most_blocks = 1
    for n in range(3):
        put(store, [n])
        assert store.flush(WAIT_S)
    ages = store._table.ages
    assert ages is not None
    assert [key(n) in ages for n in range(3)] == [False, False, True]
