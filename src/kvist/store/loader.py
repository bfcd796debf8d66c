"""Promotion: a few daemon threads read blocks from the tier below into reserved slots, in order.

Where the tier can read many at once, a thread takes several blocks, of which each is settled as
soon as its bytes are there and proven. With no read to serve, threads turn to prefetches: in small
batches, and all but one of them, so that a read that comes finds a thread soon.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from threading import Thread

from kvist.core.errors import KvistError
from kvist.core.events import Removed
from kvist.core.outcome import Outcome
from kvist.store.desk import WAKE_S, Desk
from kvist.store.entry import Entry, State
from kvist.store.link import LowerLink
from kvist.store.prefetch import Prefetcher
from kvist.tiers.protocol import BatchReader

BATCH_BLOCKS = 32
BATCH_BYTES = 64 << 20  # at its end a thread waits for its last reads: not too often
# By whether another host lent the block: then this one keeps it like one that was written here.
_LOADED = {True: State.DIRTY, False: State.CLEAN}
PREFETCH_BATCHES = 4  # a prefetch takes this part of a batch


class Loader:
    """The io threads. A thread that hangs in the medium holds its entries and no lock."""

    def __init__(
        self, desk: Desk, link: LowerLink, prefetcher: Prefetcher, *, threads: int
    ) -> None:
        self._desk = desk
        self._link = link
        self._prefetcher = prefetcher
        self._prefetch_threads = max(1, threads - 1)
        self._prefetching = 0
        self._stopping = False
        self._many = link.tier if isinstance(link.tier, BatchReader) else None
        fitting = BATCH_BYTES // desk.table.raw_bytes
        self._batch_blocks = max(1, min(BATCH_BLOCKS, fitting)) if self._many else 1
        self.threads = [
            Thread(target=self._serve, name=f"kvist-load-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, entries: list[Entry]) -> None:
        """Queues LOADING entries; caller holds the lock."""
        self._desk.loads.update(dict.fromkeys(entries))
        self._desk.load_work.notify(len(entries))

    def stop(self) -> None:
        """Fails what is queued and tells the threads to end; caller holds the lock."""
        desk = self._desk
        self._stopping = True
        for entry in desk.loads:
            desk.table.fail(entry)
        desk.loads.clear()
        self._prefetcher.clear()
        desk.load_work.notify_all()
        desk.changed.notify_all()

    def _serve(self) -> None:
        desk = self._desk
        while True:
            with desk.load_work:
                wished: list[Entry] = []
                while not (desk.loads or wished or self._stopping):
                    wished = self._begin_wishes()
                    if not wished:
                        desk.load_work.wait(WAKE_S)
                if self._stopping and not wished:
                    return
                # asked before the ticket, which turns an open breaker into one that probes
                most = 1 if self._link.probing() else self._batch_blocks
                ticket = self._link.begin_read()
                if ticket is None:
                    for entry in wished or [desk.loads.popitem(last=False)[0]]:
                        self._settle(entry, None)
                    desk.changed.notify_all()
                    continue
                batch = {e: desk.table.view(e) for e in wished} if wished else self._take(most)
                self._prefetching += bool(wished)
            self._load(batch, ticket)
            del batch
            desk.outbox.drain()
            with desk.lock:
                self._prefetching -= bool(wished)

    def _begin_wishes(self) -> list[Entry]:
        """Prefetches that may begin now, as busy entries; caller holds the lock."""
        most = max(1, self._batch_blocks // PREFETCH_BATCHES)
        if self._link.probing() or not self._link.readable():
            most = 0  # a wish is no reason to try a medium that may be down
        if self._prefetching >= self._prefetch_threads:
            most = 0
        return self._prefetcher.begin(most)

    def _take(self, most: int) -> dict[Entry, memoryview]:
        """Makes up to `most` queued entries busy; caller holds the lock."""
        desk = self._desk
        batch = {}
        for entry in list(islice(desk.loads, most)):
            del desk.loads[entry]
            entry.busy = True
            desk.table.settle(entry)
            batch[entry] = desk.table.view(entry)
        return batch

    def _load(self, batch: dict[Entry, memoryview], ticket: int) -> None:
        failure: Exception | None = None
        returned = False
        left = dict.fromkeys(batch)
        try:
            for entry, outcome in self._read(batch):
                with self._desk.lock:
                    del left[entry]
                    self._link.go_on_reading(ticket)
                    if not isinstance(outcome, Outcome):
                        failure = outcome
                    self._settle(entry, outcome)
                    self._desk.changed.notify_all()
            returned = True
        except (KvistError, OSError) as error:
            failure, returned = error, True
        finally:  # also when a faulty tier kills this thread: no entry may stay in limbo
            with self._desk.lock:
                if not returned:
                    failure = RuntimeError("the tier raised an error that it may not raise")
                    self._link.lose_reader()
                self._link.end_read(ticket, failure)
                for entry in left:
                    self._settle(entry, None)
                self._desk.changed.notify_all()

    def _read(self, batch: dict[Entry, memoryview]) -> Iterator[tuple[Entry, Outcome | Exception]]:
        entries = list(batch)
        if len(entries) > 1 and self._many is not None:
            items = [(entry.key, out) for entry, out in batch.items()]
            for i, outcome in self._many.read_many(items):
                yield entries[i], outcome
            return
        for entry, out in batch.items():
            yield entry, self._link.tier.read_into(entry.key, out)

    def _settle(self, entry: Entry, outcome: Outcome | Exception | None) -> None:
        table = self._desk.table
        entry.busy = False
        if outcome is Outcome.HIT:
            table.counters.loaded += 1
            self._link.count_read(table.raw_bytes)
            entry.lent = not entry.detached and self._link.lacks(entry.key)
            table.admit(entry, self._desk.filtered(entry, _LOADED[entry.lent]))
            if entry.state is State.DIRTY:
                self._desk.write_work.notify()
            self._prefetcher.end(entry)
            return
        if outcome is Outcome.MISS:
            table.counters.load_missed += 1
            table.outbox.put(Removed((entry.key,), self._link.name))
        else:
            table.counters.load_failed += 1
        table.fail(entry)
        self._prefetcher.end(entry)
