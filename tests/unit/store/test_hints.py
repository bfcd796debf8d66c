"""The end of a request reaches the orders that learn, once for each block and request."""

from collections.abc import Callable, Iterator

from kvist.core.errors import ClosedError
from kvist.core.hints import Finish, Hints
from kvist.core.keys import Key
from kvist.policy import Lru, Value
from kvist.store import TieredStore
from kvist.testing.store_suite import WAIT_S, key, put

MakeStore = Callable[..., TieredStore]


class Recorder(Lru):
    """An order that takes hints and keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[object] = []

    def begin(self, hints: Hints) -> None:
        self.told.append(hints)

    def insert(self, key: Key, parent: Key | None) -> None:
        self.told.append(("in", key))
        super().insert(key, parent)

    def touch(self, key: Key) -> None:
        self.told.append(key)
        super().touch(key)

    def victims(self) -> Iterator[Key]:
        return super().victims()


def test_the_end_is_told_with_the_resident_blocks_from_leaf_to_root(
    make_store: MakeStore,
) -> None:
    order = Recorder()
    store = make_store(policy=order, lower=None)
    put(store, [0, 1])
    order.told.clear()
    hints = Hints(Finish.TOOL_USE, 12)
    store.ended([key(0), key(1), key(2)], hints)
    assert order.told == [hints, key(1), key(0)]


def test_once_ends_are_told_a_request_is_one_use_of_a_block(make_store: MakeStore) -> None:
    order = Recorder()
    store = make_store(policy=order, lower=None)
    store.ended([], Hints())
    order.told.clear()
    put(store, [0])
    with store.read([key(0)], deadline_s=WAIT_S):
        pass
    assert order.told == [("in", key(0))]
    store.ended([key(0)], Hints())
    assert order.told[1:] == [Hints(), key(0)]


def test_before_any_end_is_told_releases_are_uses(make_store: MakeStore) -> None:
    order = Recorder()
    store = make_store(policy=order, lower=None)
    put(store, [0])
    with store.read([key(0)], deadline_s=WAIT_S):
        pass
    assert order.told == [("in", key(0)), key(0), key(0)]


def test_an_order_without_hints_learns_from_leases_alone(make_store: MakeStore) -> None:
    store = make_store(blocks=2, lower=None, policy=Lru())
    put(store, [0])
    put(store, [1])
    store.ended([key(0)], Hints())
    put(store, [2])
    assert [len(store.match([key(n)])) for n in range(3)] == [0, 1, 1]


def test_the_value_order_takes_ends_while_blocks_come_and_go(make_store: MakeStore) -> None:
    now = [0.0]
    store = make_store(blocks=8, lower=None, policy=Value(lambda: now[0]))
    for n in range(0, 400, 2):
        now[0] += 1
        put(store, [n, n + 1])
        now[0] += 1
        finish = Finish.TOOL_USE if n % 4 else Finish.END_TURN
        store.ended([key(max(0, n - 2)), key(n), key(n + 1)], Hints(finish, n))
    store.check_integrity()
    assert store.stats().dram_blocks == 8


def test_a_closed_store_ignores_ends(make_store: MakeStore) -> None:
    order = Recorder()
    store = make_store(policy=order, lower=None)
    store.close()
    try:
        store.ended([key(0)], Hints())
    except ClosedError as error:  # it comes while an engine shuts down
        raise AssertionError from error
    assert order.told == []
