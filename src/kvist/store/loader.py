"""Promotion: a few daemon threads read blocks from the tier below into reserved slots, in order."""

from __future__ import annotations

from threading import Thread

from kvist.core.errors import KvistError
from kvist.core.events import Removed
from kvist.core.outcome import Outcome
from kvist.store.desk import WAKE_S, Desk
from kvist.store.entry import Entry, State
from kvist.store.link import LowerLink


class Loader:
    """The io threads. A thread that hangs in the medium holds its one entry and no lock."""

    def __init__(self, desk: Desk, link: LowerLink, *, threads: int) -> None:
        self._desk = desk
        self._link = link
        self._stopping = False
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
        desk.load_work.notify_all()
        desk.changed.notify_all()

    def _serve(self) -> None:
        desk = self._desk
        while True:
            with desk.load_work:
                while not desk.loads and not self._stopping:
                    desk.load_work.wait(WAKE_S)
                if self._stopping:
                    return
                entry, _ = desk.loads.popitem(last=False)
                ticket = self._link.begin_read()
                if ticket is None:
                    desk.table.counters.load_failed += 1
                    desk.table.fail(entry)
                    desk.changed.notify_all()
                    continue
                entry.busy = True
                desk.table.settle(entry)
                out = desk.table.view(entry)
            self._load(entry, out, ticket)
            del out
            desk.outbox.drain()

    def _load(self, entry: Entry, out: memoryview, ticket: int) -> None:
        outcome: Outcome | None = None
        failure: Exception | None = None
        returned = False
        try:
            outcome = self._link.tier.read_into(entry.key, out)
            returned = True
        except (KvistError, OSError) as error:
            failure, returned = error, True
        finally:  # also when a faulty tier kills this thread: the entry must not stay in limbo
            with self._desk.lock:
                if not returned:
                    failure = RuntimeError("the tier raised an error that it may not raise")
                    self._link.lose_reader()
                self._link.end_read(ticket, failure)
                self._settle(entry, outcome)
                self._desk.changed.notify_all()

    def _settle(self, entry: Entry, outcome: Outcome | None) -> None:
        table = self._desk.table
        entry.busy = False
        if outcome is Outcome.HIT:
            table.counters.loaded += 1
            table.admit(entry, State.CLEAN)
            return
        if outcome is Outcome.MISS:
            table.counters.load_missed += 1
            table.outbox.put(Removed((entry.key,), self._link.name))
        else:
            table.counters.load_failed += 1
        table.fail(entry)
