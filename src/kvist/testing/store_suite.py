"""What every BlockStore must do, and a lower tier that fails on demand. Subclass and run."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest

from kvist.core.errors import LeaseError, NoSpaceError, TierError, TierFullError
from kvist.core.hints import Finish, Hints
from kvist.core.keys import Key
from kvist.core.lease import BlockStore
from kvist.core.outcome import BlockRef, Outcome
from kvist.tiers.protocol import ListedBlock, Payload

RAW_BYTES = 1000
WAIT_S = 10.0


def key(n: int) -> Key:
    """Key number n of the suites."""
    return n.to_bytes(32, "big")


def content(of: Key, size_bytes: int = RAW_BYTES) -> bytes:
    """The only right bytes of a key."""
    return hashlib.shake_128(of).digest(size_bytes)


def ref(n: int) -> BlockRef:
    """Block n, child of block n - 1."""
    return BlockRef(key(n), key(n - 1) if n else None)


def put(store: BlockStore, numbers: Iterable[int]) -> list[bool]:
    """Writes and commits blocks; says for each whether it was committed."""
    blocks = [ref(n) for n in numbers]
    done = []
    with store.write(blocks) as lease:
        for i, block in enumerate(blocks):
            if not lease.present(i):
                buffer = lease.buffer(i)
                buffer[:] = content(block.key, len(buffer))
            done.append(not lease.present(i) and lease.commit(i))
    return done


class DictTier:
    """A lower tier in a dict, which can fail, fill up, evict, lie (a miss) or hang."""

    def __init__(self) -> None:
        self.blocks: dict[Key, bytes] = {}
        self.checksums: dict[Key, int | None] = {}
        self.puts: list[tuple[Key, ...]] = []
        self.reads: list[Key] = []
        self.broken = False
        self.full = False
        self.forgetful = False
        self.open = threading.Event()  # cleared: reads and puts hang
        self.open.set()
        self.listable = threading.Event()  # cleared: lists hang
        self.listable.set()
        self.hanging = threading.Semaphore(0)  # released by each call that begins to hang
        self.closed = False
        self.most_blocks = 1 << 30  # more than that: the oldest are evicted
        self.tell: Callable[[Sequence[Key]], None] = lambda keys: None

    def contains(self, key: Key) -> bool:
        return key in self.blocks

    def put(self, payloads: Sequence[Payload]) -> None:
        self._gate()
        if self.broken:
            raise TierError("put: broken")
        self.puts.append(tuple(p.key for p in payloads))
        for payload in payloads:
            if self.full:
                raise TierFullError("put: full")
            self.blocks.setdefault(payload.key, bytes(payload.data))
            self.checksums[payload.key] = payload.checksum
        gone = list(self.blocks)[: max(0, len(self.blocks) - self.most_blocks)]
        for key in gone:
            del self.blocks[key]
        if gone:
            self.tell(gone)

    def read_into(self, key: Key, out: memoryview) -> Outcome:
        self.reads.append(key)
        self._gate()
        if self.broken:
            raise TierError("read: broken")
        data = self.blocks.get(key)
        if data is None or self.forgetful:
            self.blocks.pop(key, None)
            return Outcome.MISS
        out[:] = data
        return Outcome.HIT

    def remove(self, keys: Iterable[Key]) -> None:
        if self.broken:
            raise TierError("remove: broken")
        for gone in keys:
            self.blocks.pop(gone, None)

    def list_blocks(self, *, newest_first: bool = False) -> Iterator[ListedBlock]:
        self.listable.wait(WAIT_S)
        if self.broken:
            raise TierError("list: broken")
        keys = list(self.blocks)
        return (ListedBlock(key, None) for key in (reversed(keys) if newest_first else keys))

    def tell_evictions(self, tell: Callable[[Sequence[Key]], None]) -> None:
        self.tell = tell

    def close(self) -> None:
        self.closed = True

    def _gate(self) -> None:
        if not self.open.is_set():
            self.hanging.release()
            if not self.open.wait(60):
                raise TierError("hung for a minute")


class StoreSuite:
    """The contract of `BlockStore`, one claim a test."""

    capacity_blocks = 8

    @pytest.fixture
    def store(self) -> BlockStore:
        """A new store of exactly `capacity_blocks` DRAM slots, closed afterwards."""
        raise NotImplementedError

    def drop_from_dram(self, store: BlockStore) -> None:
        """Override to move every block below DRAM, where there is something below."""

    def test_an_empty_store_matches_nothing(self, store: BlockStore) -> None:
        assert len(store.match([key(1), key(2)])) == 0
        assert len(store.match([])) == 0

    def test_a_committed_block_reads_back_exactly(self, store: BlockStore) -> None:
        assert put(store, range(3)) == [True] * 3
        assert len(store.match([key(n) for n in range(4)])) == 3
        with store.read([key(n) for n in range(3)], deadline_s=WAIT_S) as lease:
            assert [lease.wait(i) for i in range(3)] == [Outcome.HIT] * 3
            assert lease.ready()
            assert lease.hits() == len(lease) == 3
            assert all(bytes(lease.buffer(i)) == content(key(i)) for i in range(3))

    def test_a_block_comes_back_from_below(self, store: BlockStore) -> None:
        put(store, range(4))
        self.drop_from_dram(store)
        with store.read([key(n) for n in range(4)], deadline_s=WAIT_S) as lease:
            assert [lease.wait(i) for i in range(4)] == [Outcome.HIT] * 4
            assert all(bytes(lease.buffer(i)) == content(key(i)) for i in range(4))

    def test_match_is_the_run_from_the_start(self, store: BlockStore) -> None:
        put(store, [0, 1, 3])
        assert len(store.match([key(n) for n in range(4)])) == 2
        assert len(store.match([key(2), key(3)])) == 0

    def test_an_absent_block_is_a_miss_at_once(self, store: BlockStore) -> None:
        put(store, [0, 2])
        with store.read([key(n) for n in range(3)], deadline_s=WAIT_S) as lease:
            assert lease.outcome(1) is Outcome.MISS
            assert lease.wait(2) is Outcome.HIT
            assert lease.wait(0) is Outcome.HIT
            assert lease.hits() == 1

    def test_an_uncommitted_block_is_invisible_and_freed(self, store: BlockStore) -> None:
        with store.write([ref(0)]) as lease:
            assert not lease.present(0)
            assert len(store.match([key(0)])) == 0
            with store.read([key(0)], deadline_s=WAIT_S) as read:
                assert read.wait(0) is Outcome.MISS
            assert store.room_blocks() == self.capacity_blocks - 1
        assert store.room_blocks() == self.capacity_blocks
        assert len(store.match([key(0)])) == 0

    def test_the_first_writer_wins(self, store: BlockStore) -> None:
        with store.write([ref(0), ref(0)]) as first, store.write([ref(0)]) as second:
            assert [first.present(0), first.present(1), second.present(0)] == [False, True, True]
            with pytest.raises(LeaseError):
                second.commit(0)
            first.buffer(0)[:] = content(key(0))
            assert first.commit(0)
        assert put(store, [0]) == [False]

    def test_committing_twice_is_an_error(self, store: BlockStore) -> None:
        with store.write([ref(0)]) as lease:
            assert lease.commit(0)
            with pytest.raises(LeaseError):
                lease.commit(0)

    def test_reserving_is_all_or_nothing(self, store: BlockStore) -> None:
        with store.write([ref(n) for n in range(self.capacity_blocks - 1)]):
            assert store.room_blocks() == 1
            with pytest.raises(NoSpaceError):
                store.write([ref(100), ref(101)])
            assert store.room_blocks() == 1
            with store.write([ref(100)]):
                assert store.room_blocks() == 0
        assert store.room_blocks() == self.capacity_blocks

    def test_leased_blocks_are_not_evicted(self, store: BlockStore) -> None:
        put(store, [0, 1])
        with store.read([key(0), key(1)], deadline_s=WAIT_S) as lease:
            assert [lease.wait(0), lease.wait(1)] == [Outcome.HIT] * 2
            with pytest.raises(NoSpaceError):
                store.write([ref(n) for n in range(100, 100 + self.capacity_blocks - 1)])
            with store.write([ref(n) for n in range(200, 200 + self.capacity_blocks - 2)]) as full:
                for i in range(len(full)):
                    full.buffer(i)[:] = b"x" * len(full.buffer(i))
            assert [bytes(lease.buffer(i)) for i in range(2)] == [content(key(0)), content(key(1))]

    def test_a_full_store_makes_room(self, store: BlockStore) -> None:
        for n in range(3 * self.capacity_blocks):
            self.wait_for_room(store, 1)
            assert put(store, [n]) == [True]
        assert len(store.match([key(3 * self.capacity_blocks - 1)])) == 1

    def wait_for_room(self, store: BlockStore, blocks: int) -> None:
        """Override where room comes only after blocks were written below."""

    def test_a_prefetch_takes_no_block_away_and_never_raises(self, store: BlockStore) -> None:
        put(store, range(4))
        self.drop_from_dram(store)
        keys = [key(n) for n in range(4)]
        assert store.prefetch([key(100), key(101)], deadline_s=WAIT_S) == 0
        assert 0 <= store.prefetch(keys, deadline_s=WAIT_S) <= len(keys)
        assert store.prefetch(keys, deadline_s=0) <= len(keys)
        with store.read(keys, deadline_s=WAIT_S) as lease:
            assert [lease.wait(i) for i in range(4)] == [Outcome.HIT] * 4
            assert all(bytes(lease.buffer(i)) == content(key(i)) for i in range(4))
        self.wait_for_room(store, self.capacity_blocks)
        with store.write([ref(n) for n in range(200, 200 + self.capacity_blocks)]):
            assert store.prefetch(keys, deadline_s=WAIT_S) <= len(keys)

    def test_tenants_share_blocks_and_keys(self, store: BlockStore) -> None:
        with store.write([BlockRef(key(0), None, "a")]) as lease:
            lease.buffer(0)[:] = content(key(0))
            assert lease.commit(0)
        with store.write([BlockRef(key(0), None, "b")]) as second:
            assert second.present(0)
        with store.read([key(0)], deadline_s=WAIT_S, tenant="b") as read:
            assert read.wait(0) is Outcome.HIT
        assert store.room_blocks("a") == store.room_blocks("b") == store.room_blocks()

    def test_the_end_of_a_request_changes_no_answer(self, store: BlockStore) -> None:
        put(store, [0, 1])
        store.ended([key(0), key(1), key(2)], Hints(Finish.END_TURN, 5))
        store.ended([], Hints())
        assert len(store.match([key(n) for n in range(3)])) == 2

    def test_a_released_lease_holds_nothing(self, store: BlockStore) -> None:
        put(store, [0])
        read = store.read([key(0)], deadline_s=WAIT_S)
        assert read.wait(0) is Outcome.HIT
        assert read.slot(0) >= 0
        write = store.write([ref(1)])
        assert write.slot(0) != read.slot(0)
        for _ in range(2):
            read.release()
            write.release()
        for use in (read.slot, read.buffer, write.slot, write.buffer, write.commit):
            with pytest.raises(LeaseError):
                use(0)

    def test_a_read_buffer_cannot_be_written(self, store: BlockStore) -> None:
        put(store, [0])
        with store.read([key(0)], deadline_s=WAIT_S) as lease:
            assert lease.wait(0) is Outcome.HIT
            with pytest.raises(TypeError):
                lease.buffer(0)[0] = 1
