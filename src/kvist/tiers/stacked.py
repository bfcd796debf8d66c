"""An SSD tier above a remote: written through both, read from the disk first.

`put` returns when the disk has the blocks; copies of them wait in memory, under a byte cap, for a
thread that stores them in the remote, so that a slow remote delays nobody. What does not fit is not
stored there: the newest, since a block without its parents is of no use. A disk that fails is left
alone for a while, and blocks go to the remote at once. A remote that fails is a miss, never an
error: its own breaker (`adapters/layers/breaker.py`) decides when it is asked again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from threading import Condition, Thread

from kvist.core.errors import ClosedError, KvistError, TierError, TierFullError
from kvist.core.keys import Key
from kvist.core.outcome import Outcome, ReadTotals, Tier
from kvist.tiers.busy import BusyMeter
from kvist.tiers.protocol import ListedBlock, Payload
from kvist.tiers.remote.tier import RemoteTier
from kvist.tiers.ssd.striped import StripedTier
from kvist.tiers.ssd.tier import SsdTier

DEFAULT_QUEUE_BYTES = 256 << 20
_log = logging.getLogger(__name__)
_BATCH_BLOCKS = 32
_BATCH_BYTES = 64 << 20
_WAKE_S = 0.5
_REST_S = 5.0  # a disk that failed is left alone for so long
_DRAIN_S = 2.0  # how long `close` lets copies go out
_MOST_OWED = 100_000

_Reads = Iterator[tuple[int, Outcome | TierError]]


@dataclass(frozen=True, slots=True)
class StackedStats:
    """Blocks that wait for the remote now; totals of those sent, refused, and failed."""

    waiting: int
    waiting_bytes: int
    sent: int
    refused: int
    failed: int
    disk_failures: int


class StackedTier:
    """A `LowerTier` of two. Thread-safe."""

    def __init__(
        self,
        disk: SsdTier | StripedTier,
        remote: RemoteTier,
        *,
        queue_bytes: int = DEFAULT_QUEUE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Owns both. At most `queue_bytes` of copies wait for the remote."""
        self._disk = disk
        self._remote = remote
        self._queue_bytes = queue_bytes
        self._clock = clock
        self._disk_meter = BusyMeter(clock)
        self._disk_rests_until_s = 0.0
        self._work = Condition()
        self._waiting: dict[Key, Payload] = {}
        self._waiting_bytes = 0
        self._sending: dict[Key, Payload] = {}
        self._owed: dict[Key, None] = {}  # removals that the remote has not taken yet
        self._counts = StackedStats(0, 0, 0, 0, 0, 0)
        self._closed = False
        self._sender = Thread(target=self._send_on, name="kvist-upload", daemon=True)
        self._sender.start()

    def contains(self, key: Key) -> bool:
        """Whether `key` is on disk, or believed to be in the remote. No I/O."""
        return self._on_disk(key) or self._remote.contains(key)

    def contains_run(self, keys: Sequence[Key]) -> int:
        """How many keys from the first on are here or there; one probe of the remote at most."""
        run = self._known_run(keys)
        if run < len(keys):
            found = self._remote.contains_run(keys[run:])
            if found:
                run += found + self._known_run(keys[run + found :])
        return run

    def tiers_of(self, keys: Sequence[Key]) -> tuple[Tier, ...]:
        """See `tiers.protocol.Stacked`."""
        return tuple(Tier.SSD if self._on_disk(key) else Tier.REMOTE for key in keys)

    def put(self, payloads: Sequence[Payload]) -> None:
        """Stores blocks on disk, and in the remote soon; a failing disk's go there at once.

        Raises:
            TierFullError: neither has room.
            TierError: both failed.
            ClosedError: the tier was closed.
        """
        self._demand_open()
        failure: TierError | None = None
        if self._disk_works():
            try:
                self._disk.put(payloads)
            except TierError as error:
                failure = error
                self._excuse_disk(error)
        if failure is None and self._disk_works():
            self._queue(payloads)
            return
        try:
            self._remote.put(payloads)
        except TierError as error:
            raise failure or error from error

    def read_into(self, key: Key, out: memoryview) -> Outcome:
        """Reads and proves one block, from the disk if it has it.

        Raises:
            ClosedError: the tier was closed.
        """
        outcomes = dict(self.read_many([(key, out)]))
        outcome = outcomes[0]
        if isinstance(outcome, TierError):
            raise outcome
        return outcome

    def read_many(self, items: Sequence[tuple[Key, memoryview]]) -> _Reads:
        """Reads from both at once; what the disk turns out not to have is asked of the remote.

        Raises:
            ClosedError: the tier was closed.
        """
        self._demand_open()
        return self._read_many(items)

    def _read_many(self, items: Sequence[tuple[Key, memoryview]]) -> _Reads:
        here = [i for i, (key, _) in enumerate(items) if self._on_disk(key)]
        there = sorted(set(range(len(items))).difference(here))
        lost: list[int] = []
        with closing(self._from_remote(items, there)) as remote:
            next(remote)
            for i, outcome in self._from_disk(items, here):
                if outcome is Outcome.HIT or not self._remote.contains(items[i][0]):
                    yield i, outcome
                else:
                    lost.append(i)
            yield from remote
        with closing(self._from_remote(items, lost)) as remote:
            next(remote)
            yield from remote

    def _from_disk(self, items: Sequence[tuple[Key, memoryview]], chosen: Sequence[int]) -> _Reads:
        if not chosen:
            return
        with self._disk_meter.busy():
            for n, outcome in self._disk.read_many([items[i] for i in chosen]):
                if outcome is Outcome.HIT:
                    self._disk_meter.count(items[chosen[n]][1].nbytes)
                elif isinstance(outcome, TierError):
                    self._excuse_disk(outcome)
                yield chosen[n], outcome

    def _from_remote(
        self, items: Sequence[tuple[Key, memoryview]], chosen: Sequence[int]
    ) -> Generator[tuple[int, Outcome | TierError], None, None]:
        """Begins to read, yields once for that, and then what became of each; no error."""
        reads = self._remote.read_many([items[i] for i in chosen]) if chosen else iter(())
        yield -1, Outcome.PENDING
        for n, outcome in reads:
            if isinstance(outcome, TierError):
                _log.warning("remote: read failed: %s", outcome)
                outcome = Outcome.MISS
            yield chosen[n], outcome

    def remove(self, keys: Iterable[Key]) -> None:
        """Forgets blocks in both. The remote's are removed when it can be reached.

        Raises:
            TierError: the disk failed.
            ClosedError: the tier was closed.
        """
        self._demand_open()
        gone = list(keys)
        with self._work:
            for key in gone:
                payload = self._waiting.pop(key, None)
                if payload is not None:
                    self._waiting_bytes -= payload.data.nbytes
        try:
            self._disk.remove(gone)
        finally:
            self._remove_remote(gone)
            self._owe(key for key in gone if key in self._sending)

    def clear(self) -> None:
        """Forgets every block of this keyspace in both, for every host.

        Raises:
            TierError: one of them failed; both were asked.
            ClosedError: the tier was closed.
        """
        self._demand_open()
        with self._work:
            self._waiting_bytes -= sum(p.data.nbytes for p in self._waiting.values())
            self._waiting.clear()
        try:
            self._disk.clear()
        finally:
            self._remote.clear()
            self._owe(list(self._sending))

    def tell_evictions(self, tell: Callable[[Sequence[Key]], None]) -> None:
        """See `tiers.protocol.TellsEvictions`; tells of the disk's."""
        self._disk.tell_evictions(tell)

    def list_blocks(self, *, newest_first: bool = False) -> Iterator[ListedBlock]:
        """See `tiers.protocol.Lists`; names the disk's blocks."""
        return self._disk.list_blocks(newest_first=newest_first)

    def read_totals(self) -> Mapping[Tier, ReadTotals]:
        """See `tiers.protocol.Stacked`."""
        return {Tier.SSD: self._disk_meter.totals(), Tier.REMOTE: self._remote.read_totals()}

    def stats(self) -> StackedStats:
        """Counters now."""
        with self._work:
            waiting = len(self._waiting) + len(self._sending)
            return replace(self._counts, waiting=waiting, waiting_bytes=self._waiting_bytes)

    def samples(self) -> Mapping[str, float]:
        """See `tiers.protocol.Sampled`."""
        stats = self.stats()
        return dict(self._remote.samples()) | {
            "kvist_remote_waiting_bytes": float(stats.waiting_bytes),
            "kvist_remote_unsent_total.refused": float(stats.refused),
            "kvist_remote_unsent_total.failed": float(stats.failed),
        }

    def wait_sent(self, timeout_s: float) -> bool:
        """Whether everything that waits for the remote has been sent, or given up, in time."""
        with self._work:
            return self._work.wait_for(
                lambda: not (self._waiting or self._sending or self._owed), timeout_s
            )

    def close(self) -> None:
        """Sends what still waits, for two seconds at most, and closes both. Idempotent.

        Raises:
            TierError: the disk failed.
        """
        if self._closed:
            return
        if self._remote.stats().available:
            self.wait_sent(_DRAIN_S)
        with self._work:
            self._closed = True
            self._work.notify_all()
            if self._waiting:
                _log.warning("remote: %d blocks were not sent before the end", len(self._waiting))
        self._sender.join(_DRAIN_S)
        try:
            self._disk.close()
        finally:
            self._remote.close()

    def _known_run(self, keys: Sequence[Key]) -> int:
        run = 0
        while run < len(keys):
            here = self._disk.contains_run(keys[run:]) if self._disk_works() else 0
            there = self._remote.known_run(keys[run + here :])
            if not here + there:
                break
            run += here + there
        return run

    def _on_disk(self, key: Key) -> bool:
        return self._disk.contains(key) and self._disk_works()

    def _disk_works(self) -> bool:
        return self._clock() >= self._disk_rests_until_s

    def _excuse_disk(self, error: TierError) -> None:
        """A failure; what is full can still be read."""
        with self._work:
            failures = self._counts.disk_failures + 1
            self._counts = replace(self._counts, disk_failures=failures)
        if not isinstance(error, TierFullError):
            self._disk_rests_until_s = self._clock() + _REST_S
            _log.warning("ssd rests for %.0f s: %s", _REST_S, error)

    def _queue(self, payloads: Sequence[Payload]) -> None:
        """Copies blocks for the sender, as many as there is room for."""
        if not self._remote.stats().available:
            wanted: list[Payload] = []
            self._count(refused=len(payloads))
        else:
            wanted = [p for p in payloads if not self._remote.known_run((p.key,))]
        for payload in wanted:
            with self._work:
                size_bytes = payload.data.nbytes
                if payload.key in self._waiting or payload.key in self._sending:
                    continue
                if self._waiting_bytes + size_bytes > self._queue_bytes:
                    self._count(refused=1)
                    continue
                self._waiting_bytes += size_bytes  # before the copy: the cap holds
            copy = replace(payload, data=memoryview(bytes(payload.data)))
            with self._work:
                self._waiting[payload.key] = copy
                self._work.notify_all()

    def _send_on(self) -> None:
        while True:
            with self._work:
                while not (self._closed or self._waiting or self._owed):
                    self._work.wait(_WAKE_S)
                if self._closed:
                    return
                owed, self._owed = list(self._owed), {}
                batch = self._take_batch()
            if owed:
                self._remove_remote(owed)
            if batch:
                self._send(batch)
            with self._work:
                self._sending = {}
                self._work.notify_all()
                if self._owed and not self._closed and not batch:
                    self._work.wait(_WAKE_S)  # the remote does not answer

    def _take_batch(self) -> list[Payload]:
        batch: list[Payload] = []
        size_bytes = 0
        for payload in self._waiting.values():
            size_bytes += payload.data.nbytes
            if batch and (size_bytes > _BATCH_BYTES or len(batch) == _BATCH_BLOCKS):
                break
            batch.append(payload)
        for payload in batch:
            del self._waiting[payload.key]
        self._sending = {p.key: p for p in batch}
        return batch

    def _send(self, batch: Sequence[Payload]) -> None:
        failed = True
        try:
            self._remote.put(batch)
            failed = False
        except ClosedError:
            return
        except (KvistError, OSError) as error:
            _log.warning("remote: %d blocks could not be stored: %s", len(batch), error)
        finally:
            with self._work:
                self._waiting_bytes -= sum(p.data.nbytes for p in batch)
                self._count(failed=len(batch)) if failed else self._count(sent=len(batch))

    def _remove_remote(self, keys: Sequence[Key]) -> None:
        """Removes what may be there; a remote that fails owes it."""
        try:
            self._remote.remove(keys)
        except (TierError, ClosedError) as error:
            _log.warning("remote: %d blocks could not be removed yet: %s", len(keys), error)
            self._owe(keys)

    def _owe(self, keys: Iterable[Key]) -> None:
        """Lets the sender remove these from the remote, after what it is sending."""
        with self._work:
            for key in keys:
                if len(self._owed) < _MOST_OWED:
                    self._owed[key] = None
            self._work.notify_all()

    def _count(self, *, sent: int = 0, refused: int = 0, failed: int = 0) -> None:
        with self._work:
            old = self._counts
            self._counts = replace(
                old,
                sent=old.sent + sent,
                refused=old.refused + refused,
                failed=old.failed + failed,
            )

    def _demand_open(self) -> None:
        if self._closed:
            raise ClosedError("the tier was closed")
