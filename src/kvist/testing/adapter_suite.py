"""`AdapterSuite`: what every storage adapter must do. Subclass it and define `open_adapter`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from kvist.adapters.protocol import (
    Fetched,
    Got,
    NewObject,
    Put,
    PutReport,
    StorageAdapter,
    Wanted,
)
from kvist.core.errors import ClosedError, TierFullError
from kvist.native import digest

OBJECT_BYTES = 8192
CAPACITY_BYTES = 1 << 20
THREAD_TIMEOUT_S = 60.0
_PAGES_LIMIT = 10_000


def suite_name(i: int, folder: str = "aa") -> str:
    """A name like those that a tier gives its blocks."""
    return f"{folder}/{digest(b'name %d' % i).hex()}"


def suite_object(i: int, size_bytes: int = OBJECT_BYTES) -> bytes:
    """The bytes of object `i`."""
    return (digest(b"object %d" % i) * (size_bytes // 32 + 1))[:size_bytes]


def new_object(i: int, size_bytes: int = OBJECT_BYTES, folder: str = "aa") -> NewObject:
    """Object `i`, in three parts of which one is empty."""
    data = memoryview(suite_object(i, size_bytes))
    return NewObject(suite_name(i, folder), (data[:5], data[5:5], data[5:]))


def fetch(
    adapter: StorageAdapter, i: int, size_bytes: int = OBJECT_BYTES, folder: str = "aa"
) -> bytes | None:
    """Bytes of object `i`; `None` if it is not a hit."""
    head, tail = bytearray(min(7, size_bytes)), bytearray(max(0, size_bytes - 7))
    wanted = Wanted(suite_name(i, folder), (memoryview(head), memoryview(tail)))
    (fetched,) = adapter.get([wanted])
    return bytes(head + tail) if fetched.got is Got.HIT else None


def probe(adapter: StorageAdapter, numbers: Sequence[int]) -> list[bool]:
    """Which objects are there, by probes."""
    found = adapter.get([Wanted(suite_name(i)) for i in numbers])
    return [f.got is Got.HIT for f in found]


def all_names(adapter: StorageAdapter, prefix: str = "", *, limit: int = 1000) -> list[str]:
    """Every name of a whole listing, page by page."""
    names: list[str] = []
    cursor: str | None = None
    for _ in range(_PAGES_LIMIT):
        page = adapter.list_page(prefix, cursor=cursor, limit=limit)
        names += [entry.name for entry in page.entries]
        cursor = page.cursor
        if cursor is None:
            return names
    raise AssertionError("the listing has no end")


class AdapterSuite:
    """Subclass as `class TestMine(AdapterSuite)`."""

    limits_itself = True  # whether it keeps `capacity_bytes` by itself
    lists = True  # whether it can name all that is there
    takes_empty = True  # whether an object may have no bytes
    tells_winner = True  # whether of writers that race only one hears that it has stored

    def open_adapter(
        self, directory: Path, capacity_bytes: int | None = CAPACITY_BYTES
    ) -> StorageAdapter:
        """An adapter on the medium that belongs to `directory`, which several may share."""
        raise NotImplementedError

    @pytest.fixture
    def adapter(self, tmp_path: Path) -> Iterator[StorageAdapter]:
        adapter = self.open_adapter(tmp_path)
        yield adapter
        adapter.close()

    def test_what_is_put_is_got_back_equal(self, adapter: StorageAdapter) -> None:
        report = adapter.put([new_object(i) for i in range(10)])
        assert report == PutReport((Put.STORED,) * 10)
        assert [fetch(adapter, i) for i in range(10)] == [suite_object(i) for i in range(10)]

    def test_one_call_gets_many_into_their_own_buffers(self, adapter: StorageAdapter) -> None:
        sizes = [10, 4096, 1, 70_000, 12_288]
        adapter.put([new_object(i, size) for i, size in enumerate(sizes)])
        order = [4, 0, 99, 2, 1, 3]
        outs = [bytearray(sizes[i] if i < len(sizes) else 3) for i in order]
        wanted = [Wanted(suite_name(i), (memoryview(o),)) for i, o in zip(order, outs, strict=True)]
        found = adapter.get(wanted)
        for i, out, fetched in zip(order, outs, found, strict=True):
            if i == 99:
                assert fetched == Fetched(Got.ABSENT)
                continue
            assert fetched == Fetched(Got.HIT, sizes[i])
            assert bytes(out) == suite_object(i, sizes[i])

    def test_absent_object_is_absent_and_no_fault(self, adapter: StorageAdapter) -> None:
        assert adapter.get([Wanted(suite_name(1))]) == [Fetched(Got.ABSENT)]
        assert fetch(adapter, 1) is None
        adapter.delete([suite_name(1)])

    def test_calls_without_objects_do_nothing(self, adapter: StorageAdapter) -> None:
        assert adapter.get([]) == []
        assert adapter.put([]).outcomes == ()
        adapter.delete([])
        assert all_names(adapter) == []

    def test_probe_tells_presence_and_size(self, adapter: StorageAdapter) -> None:
        adapter.put([new_object(1), new_object(3, 100)])
        found = adapter.get([Wanted(suite_name(i)) for i in (1, 2, 3)])
        assert found == [
            Fetched(Got.HIT, OBJECT_BYTES),
            Fetched(Got.ABSENT),
            Fetched(Got.HIT, 100),
        ]

    def test_empty_object_is_there(self, adapter: StorageAdapter) -> None:
        if not self.takes_empty:
            pytest.skip("its medium refuses empty objects")
        empty = NewObject(suite_name(1), ())
        assert adapter.put([empty]).outcomes == (Put.STORED,)
        assert adapter.get([Wanted(suite_name(1))]) == [Fetched(Got.HIT, 0)]
        assert adapter.put([new_object(1)]).outcomes == (Put.PRESENT,)
        out = memoryview(bytearray(10))
        assert adapter.get([Wanted(suite_name(1), (out,))]) == [Fetched(Got.SIZE, 0)]
        adapter.delete([suite_name(1)])
        assert probe(adapter, [1]) == [False]

    def test_buffers_of_another_size_are_told_so(self, adapter: StorageAdapter) -> None:
        adapter.put([new_object(1)])
        for size in (OBJECT_BYTES - 1, OBJECT_BYTES + 1, 1):
            out = memoryview(bytearray(size))
            assert adapter.get([Wanted(suite_name(1), (out,))]) == [Fetched(Got.SIZE, OBJECT_BYTES)]
        assert fetch(adapter, 1) == suite_object(1)

    def test_first_writer_wins(self, adapter: StorageAdapter) -> None:
        adapter.put([new_object(1)])
        other = NewObject(suite_name(1), (memoryview(bytes(50)),))
        assert adapter.put([other]).outcomes == (Put.PRESENT,)
        assert adapter.put([other, new_object(2)]).outcomes == (Put.PRESENT, Put.STORED)
        assert fetch(adapter, 1) == suite_object(1)

    def test_parts_may_change_after_put(self, adapter: StorageAdapter) -> None:
        data = bytearray(suite_object(1))
        adapter.put([NewObject(suite_name(1), (memoryview(data),))])
        data[:] = bytes(OBJECT_BYTES)
        assert fetch(adapter, 1) == suite_object(1)

    def test_deleted_object_is_gone_and_can_come_back(self, adapter: StorageAdapter) -> None:
        adapter.put([new_object(i) for i in range(4)])
        adapter.delete([suite_name(1), suite_name(3), suite_name(99)])
        assert probe(adapter, range(4)) == [True, False, True, False]
        assert adapter.put([new_object(1)]).outcomes == (Put.STORED,)
        assert fetch(adapter, 1) == suite_object(1)

    def test_another_adapter_sees_the_same_medium(
        self, adapter: StorageAdapter, tmp_path: Path
    ) -> None:
        adapter.put([new_object(i) for i in range(5)])
        other = self.open_adapter(tmp_path)
        assert [fetch(other, i) for i in range(5)] == [suite_object(i) for i in range(5)]
        assert other.put([new_object(1)]).outcomes == (Put.PRESENT,)
        other.delete([suite_name(2)])
        other.put([new_object(7)])
        other.close()
        assert probe(adapter, [2, 7]) == [False, True]
        assert fetch(adapter, 7) == suite_object(7)

    def test_pages_name_every_object_of_the_prefix(self, adapter: StorageAdapter) -> None:
        adapter.put([new_object(i, 50, "aa") for i in range(25)])
        if not self.lists:
            assert adapter.list_page("aa/").partial
            pytest.skip("its medium cannot list")
        adapter.put([new_object(i, 50, "ab") for i in range(7)])
        for limit in (1, 4, 1000):
            names = all_names(adapter, "aa/", limit=limit)
            assert sorted(set(names)) == sorted(suite_name(i, "aa") for i in range(25))
        assert len(set(all_names(adapter, "a"))) == 32
        assert len(set(all_names(adapter, suite_name(3, "ab")[:12]))) == 1
        assert all_names(adapter, "b") == []

    def test_names_that_could_lead_elsewhere_are_refused(self, adapter: StorageAdapter) -> None:
        data = memoryview(b"x")
        for bad in ("", "/etc/a", "../a", "a/../b", "a//b", "A", "a b", "a/", "a*", "x" * 201):
            with pytest.raises(ValueError, match="name"):
                adapter.put([NewObject(bad, (data,))])
            with pytest.raises(ValueError, match="name"):
                adapter.get([Wanted(bad)])
            with pytest.raises(ValueError, match="name"):
                adapter.delete([bad])
        for bad in ("../", "/", "a*", "A"):
            with pytest.raises(ValueError, match="name"):
                adapter.list_page(bad)

    def test_close_is_idempotent_and_final(self, adapter: StorageAdapter) -> None:
        adapter.close()
        adapter.close()
        calls: list[Callable[[], object]] = [
            lambda: adapter.get([Wanted(suite_name(1))]),
            lambda: adapter.put([new_object(1)]),
            lambda: adapter.delete([suite_name(1)]),
            lambda: adapter.list_page(""),
        ]
        for call in calls:
            with pytest.raises(ClosedError):
                call()

    def test_old_objects_go_when_the_cap_is_exceeded(self, adapter: StorageAdapter) -> None:
        if not self.limits_itself:
            pytest.skip("its medium evicts by rules of its own")
        count = 3 * CAPACITY_BYTES // OBJECT_BYTES
        evicted: set[str] = set()
        for i in range(0, count, 4):
            report = adapter.put([new_object(n) for n in range(i, i + 4)])
            evicted |= set(report.evicted)
            assert probe(adapter, range(i, i + 4)) == [True] * 4
        assert suite_name(0) in evicted
        there = set(all_names(adapter))
        assert there.isdisjoint(evicted)
        assert 0 < len(there) * OBJECT_BYTES <= CAPACITY_BYTES
        assert fetch(adapter, count - 1) == suite_object(count - 1)

    def test_object_larger_than_the_cap_is_refused(self, adapter: StorageAdapter) -> None:
        if not self.limits_itself:
            pytest.skip("its medium evicts by rules of its own")
        adapter.put([new_object(1)])
        with pytest.raises(TierFullError):
            adapter.put([new_object(2, CAPACITY_BYTES + 1)])
        assert probe(adapter, [1, 2]) == [True, False]

    def test_writers_that_race_leave_one_whole_object(
        self, adapter: StorageAdapter, tmp_path: Path
    ) -> None:
        others = [self.open_adapter(tmp_path) for _ in range(2)]
        reports: list[tuple[int, PutReport]] = []
        numbers = range(12)

        def write(n: int, mine: StorageAdapter) -> None:
            for i in numbers:
                data = memoryview(bytes([n]) * OBJECT_BYTES)
                reports.append((i, mine.put([NewObject(suite_name(i), (data,))])))

        run_threads([partial(write, n, mine) for n, mine in enumerate([adapter, *others])])
        for i in numbers:
            data = fetch(adapter, i)
            assert data is not None
            assert data == data[:1] * OBJECT_BYTES
            stored = [r for j, r in reports if j == i and r.outcomes == (Put.STORED,)]
            assert len(stored) == 1 or (stored and not self.tells_winner)
        for other in others:
            other.close()

    def test_reader_beside_a_writer_sees_whole_objects_only(
        self, adapter: StorageAdapter, tmp_path: Path
    ) -> None:
        other = self.open_adapter(tmp_path)
        wrong: list[int] = []
        done = threading.Event()

        def read() -> None:
            n = 0
            while not done.is_set():
                data = fetch(other, n % 8, 70_000)
                if data is not None and data != suite_object(n % 8, 70_000):
                    wrong.append(n)
                n += 1

        def write() -> None:
            try:
                for n in range(40):
                    adapter.put([new_object(n % 8, 70_000)])
                    if n % 3 == 2:
                        adapter.delete([suite_name((n - 1) % 8)])
            finally:
                done.set()

        run_threads([read, write])
        other.close()
        assert wrong == []


def run_threads(calls: Sequence[Callable[[], None]]) -> None:
    """Runs all at once; fails if one raises or does not end."""
    errors: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=THREAD_TIMEOUT_S)
        assert not thread.is_alive(), "a call does not end"
    assert errors == []
