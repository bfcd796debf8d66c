"""Shares of DRAM by tenant: who is over, evicts its own; nobody is pushed out beyond a share."""

from collections.abc import Callable, Iterable

import pytest

from kvist.core.errors import NoSpaceError
from kvist.core.outcome import BlockRef, Outcome
from kvist.store import Quota, TieredStore
from kvist.testing.store_suite import WAIT_S, DictTier, content, key

MakeStore = Callable[..., TieredStore]


def write(store: TieredStore, tenant: str, numbers: Iterable[int]) -> None:
    """Writes and commits blocks without a parent, one after the other."""
    for n in numbers:
        with store.write([BlockRef(key(n), None, tenant)]) as lease:
            if not lease.present(0):
                lease.buffer(0)[:] = content(key(n))
                assert lease.commit(0)


def present(store: TieredStore, *numbers: int) -> list[int]:
    return [n for n in numbers if len(store.match([key(n)]))]


@pytest.fixture
def store(make_store: MakeStore) -> TieredStore:
    """Eight slots, four at most for each tenant, nothing below."""
    return make_store(lower=None, quota=Quota(0.5))


def test_a_tenant_at_its_share_evicts_its_own_oldest_block(store: TieredStore) -> None:
    write(store, "b", [10, 11])
    write(store, "a", [0, 1, 2, 3])
    write(store, "a", [4])
    assert present(store, 0, 1, 2, 3, 4, 10, 11) == [1, 2, 3, 4, 10, 11]
    stats = store.stats()
    assert (stats.free_blocks, stats.evicted, stats.evicted_quota) == (2, 1, 1)


def test_a_tenant_over_its_share_is_refused_by_name_and_loses_nothing(store: TieredStore) -> None:
    write(store, "a", [0, 1, 2, 3])
    store.pin([key(n) for n in range(3)])
    with pytest.raises(NoSpaceError, match="tenant 'a'"):
        store.write([BlockRef(key(n), None, "a") for n in (4, 5)])
    assert present(store, 0, 1, 2, 3) == [0, 1, 2, 3]
    assert (store.stats().over_quota, store.stats().no_space) == (1, 1)
    assert store.room_blocks("a") == 1
    assert store.room_blocks("b") == 4
    write(store, "a", [4])
    assert present(store, 0, 1, 2, 3, 4) == [0, 1, 2, 4]


def test_no_tenant_pushes_out_others_beyond_its_share(store: TieredStore) -> None:
    write(store, "b", [10, 11, 12, 13])
    for n in range(20):
        write(store, "a", [n])
    assert present(store, 10, 11, 12, 13) == [10, 11, 12, 13]
    with pytest.raises(NoSpaceError):
        store.write([BlockRef(key(n), None, "c") for n in range(30, 35)])
    write(store, "c", range(30, 34))
    assert len(present(store, 10, 11, 12, 13, 16, 17, 18, 19)) == 4
    write(store, "c", [34])
    assert len(present(store, 10, 11, 12, 13, 16, 17, 18, 19)) == 4


def test_shares_by_name_and_for_all_others(make_store: MakeStore) -> None:
    store = make_store(lower=None, quota=Quota(0.25, {"big": 0.75, "": 1.0}))
    assert [store.room_blocks(t) for t in ("big", "small", "")] == [6, 2, 8]
    assert make_store(lower=None, quota=Quota(0.01)).room_blocks("a") == 1
    assert not Quota().limits
    for bad in (0.0, 1.5):
        with pytest.raises(ValueError, match="share"):
            Quota(1.0, {"a": bad})


def test_a_shared_block_counts_as_its_first_writers(store: TieredStore) -> None:
    write(store, "a", [0, 1, 2, 3])
    write(store, "b", [0, 1, 2, 3])
    assert store.room_blocks("b") == 4
    with store.read([key(0)], deadline_s=WAIT_S, tenant="b") as lease:
        assert lease.wait(0) is Outcome.HIT
        assert store.room_blocks("b") == 4
        assert store.room_blocks("a") == 3
    (info,) = store.stat(key(0))
    assert info.tenant == "a"


def test_blocks_loaded_from_below_count_as_the_readers(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store(quota=Quota(0.5))
    for n in range(6):
        tier.blocks[key(n)] = content(key(n))
    with pytest.raises(NoSpaceError, match="tenant 'a'"):
        store.read([key(n) for n in range(5)], deadline_s=WAIT_S, tenant="a")
    for first in (0, 2):
        with store.read([key(first), key(first + 1)], deadline_s=WAIT_S, tenant="a") as lease:
            assert [lease.wait(i) for i in range(2)] == [Outcome.HIT] * 2
    with store.read([key(4)], deadline_s=WAIT_S, tenant="a") as lease:
        assert lease.wait(0) is Outcome.HIT
    assert store.stats().evicted_quota == 1
    assert store.stats().dram_blocks == 4


def test_one_write_for_several_tenants_is_all_or_nothing(store: TieredStore) -> None:
    write(store, "a", [0, 1, 2, 3])
    write(store, "b", [10, 11, 12])
    store.pin([key(n) for n in (10, 11, 12)])
    refs = [BlockRef(key(4), None, "a"), BlockRef(key(13), None, "b"), BlockRef(key(14), None, "b")]
    with pytest.raises(NoSpaceError, match="tenant 'b'"):
        store.write(refs)
    assert present(store, 0, 1, 2, 3) == [0, 1, 2, 3]
    with store.write(refs[:2]):
        assert present(store, 0, 1, 2, 3) == [1, 2, 3]


def test_an_abandoned_write_and_a_cleared_lease_give_the_share_back(store: TieredStore) -> None:
    with store.write([BlockRef(key(n), None, "a") for n in range(4)]) as lease:
        assert store.room_blocks("a") == 0
        lease.commit(0)
        store.clear()
        store.check_integrity()
        assert store.room_blocks("a") == 0
    assert store.room_blocks("a") == 4


def test_unwritten_blocks_of_a_tenant_are_not_given_up(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store(quota=Quota(0.5))
    tier.open.clear()
    write(store, "a", [0, 1, 2, 3])
    assert tier.hanging.acquire(timeout=WAIT_S)
    assert store.room_blocks("a") == 0
    with pytest.raises(NoSpaceError):
        store.write([BlockRef(key(4), None, "a")])
    tier.open.set()
    assert store.flush(WAIT_S)
    write(store, "a", [4])
