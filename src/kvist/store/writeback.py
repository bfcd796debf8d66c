"""Demotion by write-through: one daemon thread writes DIRTY blocks below, in commit order.

A batch stays in the dirty queue while it is under way; its entries are `busy`, so their slots
cannot be taken. What fails stays dirty and is tried again when the breaker lets it. Between batches
the thread sweeps what has expired and removes it below.
"""

from __future__ import annotations

from itertools import islice
from threading import Thread

from kvist.core.errors import KvistError
from kvist.core.events import Removed, Stored
from kvist.core.keys import Key
from kvist.store.desk import WAKE_S, Desk
from kvist.store.entry import Entry
from kvist.store.expiry import sweep
from kvist.store.link import LowerLink
from kvist.tiers.protocol import Payload

BATCH_BLOCKS = 32
BATCH_BYTES = 64 << 20


class WriteBack:
    """The writer thread."""

    def __init__(self, desk: Desk, link: LowerLink) -> None:
        self._desk = desk
        self._link = link
        self._stopping = False
        fitting = BATCH_BYTES // desk.table.raw_bytes
        self._batch_blocks = max(1, min(BATCH_BLOCKS, fitting))
        self.thread = Thread(target=self._serve, name="kvist-write", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Tells the thread to end after its batch; caller holds the lock."""
        self._stopping = True
        self._desk.write_work.notify_all()

    def _serve(self) -> None:
        desk = self._desk
        while True:
            self._remove_expired()
            with desk.write_work:
                batch = self._next_batch()
                if batch is None:
                    return
                if not batch:
                    continue
                payloads = [
                    Payload(
                        e.key,
                        e.parent,
                        desk.table.view(e),
                        checksum=e.checksum,
                        tenant=e.tenant,
                    )
                    for e in batch
                ]
            self._put(batch, payloads)
            del payloads
            desk.outbox.drain()

    def _next_batch(self) -> list[Entry] | None:
        """Waits for work; `None` when the thread is to end, empty when something has expired."""
        desk = self._desk
        ages = desk.table.ages
        while not self._stopping:
            sweep(desk, self._link)
            if desk.table.dirty and self._link.begin_put():
                batch = list(islice(desk.table.dirty, self._batch_blocks))
                for entry in batch:
                    entry.busy = True
                    desk.table.settle(entry)
                return batch
            if ages is not None and ages.has_doomed and self._link.writable():
                return []
            desk.write_work.wait(min(WAKE_S, self._link.write.wait_s() or WAKE_S))
        return None

    def _remove_expired(self) -> None:
        """Removes what has expired below and was not written again since."""
        desk, ages = self._desk, self._desk.table.ages
        if ages is None or not ages.has_doomed:
            return
        with desk.lock:
            if not self._link.begin_put():
                return
            keys = ages.next_doomed()
        failure: Exception | None = RuntimeError("the tier raised an error that it may not raise")
        try:
            self._link.tier.remove(keys)
            failure = None
        except (KvistError, OSError) as error:
            failure = error
        finally:
            with desk.lock:
                self._link.end_put(failure)
                if isinstance(failure, RuntimeError) and not isinstance(failure, KvistError):
                    self._link.lose_writer()
                if failure is None:
                    ages.bury(keys)
                    desk.outbox.put(Removed(tuple(keys), self._link.name))
        desk.outbox.drain()

    def _put(self, batch: list[Entry], payloads: list[Payload]) -> None:
        failure: Exception | None = None
        returned = False
        try:
            self._link.tier.put(payloads)
            returned = True
        except (KvistError, OSError) as error:
            failure, returned = error, True
        finally:
            with self._desk.lock:
                if not returned:
                    failure = RuntimeError("the tier raised an error that it may not raise")
                    self._link.lose_writer()
                self._link.end_put(failure)
                cleared = [key for e in batch if (key := self._settle(e, failure)) is not None]
                self._desk.changed.notify_all()
        if cleared:
            self._link.forget(cleared)

    def _settle(self, entry: Entry, failure: Exception | None) -> Key | None:
        """Ends one block's write; returns its key if it was cleared meanwhile."""
        table = self._desk.table
        entry.busy = False
        detached = entry.detached
        below = self._link.keeps(entry.key)  # a later one may have pushed it out already
        if failure is None or below:
            table.counters.flushed += 1
            if below and not detached:
                table.outbox.put(Stored((entry.key,), entry.parent, self._link.name))
            table.cleaned(entry)
        else:
            table.counters.flush_failed += 1
            table.settle(entry)
        return entry.key if detached else None
