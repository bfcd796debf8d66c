"""The insert filter of the tier below: what is refused lives in DRAM only, and may be dropped."""

from collections.abc import Callable

from kvist.core.outcome import Outcome
from kvist.policy import Lru, SecondSight
from kvist.store import TieredStore
from kvist.store.entry import State
from kvist.testing.store_suite import WAIT_S, DictTier, content, key, put

MakeStore = Callable[..., TieredStore]


def read(store: TieredStore, n: int) -> bool:
    with store.read([key(n)], deadline_s=WAIT_S) as lease:
        return lease.wait(0) is Outcome.HIT


def test_everything_is_written_by_default(make_store: MakeStore, tier: DictTier) -> None:
    store = make_store()
    put(store, [0])
    assert store.flush(WAIT_S)
    assert set(tier.blocks) == {key(0)}
    assert store.stats().filtered == 0


def test_a_refused_block_is_readable_and_may_go_without_being_written(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store(blocks=2, policy=Lru(), insert_filter=SecondSight(100))
    put(store, [0, 1])
    assert store.flush(0)
    assert store.stats().filtered == 2
    assert store.room_blocks() == 2
    put(store, [2, 3])
    assert [len(store.match([key(n)])) for n in range(4)] == [0, 0, 1, 1]
    assert store.stats().evicted_unflushed == 0
    assert not tier.puts
    store.close()
    assert not tier.blocks


def test_a_block_written_a_second_time_goes_below(make_store: MakeStore, tier: DictTier) -> None:
    store = make_store(blocks=1, policy=Lru(), insert_filter=SecondSight(100))
    put(store, [0])
    put(store, [1])
    put(store, [0])
    assert store.flush(WAIT_S)
    assert set(tier.blocks) == {key(0)}
    assert store.stats().filtered == 2


def test_a_refused_block_that_is_read_goes_below(make_store: MakeStore, tier: DictTier) -> None:
    store = make_store(insert_filter=SecondSight(100))
    put(store, [0, 1])
    with store.read([key(0)], deadline_s=WAIT_S) as lease:
        assert lease.wait(0) is Outcome.HIT
        assert bytes(lease.buffer(0)) == content(key(0))
        assert store.flush(WAIT_S)
        assert bytes(lease.buffer(0)) == content(key(0))
    assert set(tier.blocks) == {key(0)}
    assert read(store, 0)
    assert store.stats().flushed == 1
    (info, _) = store.stat(key(0))
    assert info.state is State.CLEAN


def test_the_filter_is_not_asked_where_nothing_is_below(make_store: MakeStore) -> None:
    store = make_store(lower=None, insert_filter=SecondSight(100))
    put(store, [0])
    assert store.stats().filtered == 0
    assert read(store, 0)


def test_a_block_that_comes_from_below_is_not_filtered(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store(insert_filter=SecondSight(100))
    tier.blocks[key(0)] = content(key(0))
    assert read(store, 0)
    assert read(store, 0)
    assert (store.stats().filtered, tier.puts) == (0, [])
