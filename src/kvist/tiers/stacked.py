"""An SSD tier above a remote: written through both, read from the disk first.

`put` returns when the disk has the blocks; copies of them wait in memory to be stored in the remote
(`outgoing.py`), so that a slow remote delays nobody. A disk that fails is left alone for a while,
and blocks go to the remote at once. A remote that fails is a miss, never an error: its own breaker
(`adapters/layers/breaker.py`) decides when it is asked again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing

from kvist.core.errors import ClosedError, TierError, TierFullError
from kvist.core.keys import Key
from kvist.core.outcome import Outcome, ReadTotals, Tier
from kvist.tiers.busy import BusyMeter
from kvist.tiers.outgoing import Outgoing, OutgoingStats
from kvist.tiers.protocol import ListedBlock, Payload, Space
from kvist.tiers.remote.tier import RemoteTier
from kvist.tiers.ssd.striped import StripedTier
from kvist.tiers.ssd.tier import SsdTier

DEFAULT_QUEUE_BYTES = 256 << 20
_log = logging.getLogger(__name__)
_REST_S = 5.0  # a disk that failed is left alone for so long
_DRAIN_S = 2.0  # how long `close` lets copies go out

_Reads = Iterator[tuple[int, Outcome | TierError]]


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
        self._outgoing = Outgoing(remote, most_bytes=queue_bytes)
        self._clock = clock
        self._disk_meter = BusyMeter(clock)
        self._disk_rests_until_s = 0.0
        self._closed = False
        self.disk_failures = 0

    def contains(self, key: Key) -> bool:
        """Whether `key` is on disk, or believed to be in the remote. No I/O."""
        return not self._closed and (self._on_disk(key) or self._remote.contains(key))

    def contains_run(self, keys: Sequence[Key]) -> int:
        """How many keys from the first on are here or there; one probe of the remote at most."""
        run = 0 if self._closed else self._known_run(keys)
        if run < len(keys) and not self._closed:
            found = self._remote.contains_run(keys[run:])
            if found:
                run += found + self._known_run(keys[run + found :])
        return run

    def tiers_of(self, keys: Sequence[Key]) -> tuple[Tier, ...]:
        """See `tiers.protocol.Stacked`."""
        return tuple(Tier.SSD if self._on_disk(key) else Tier.REMOTE for key in keys)

    def keeps(self, key: Key) -> bool:
        """See `tiers.protocol.TellsOwn`."""
        return self.contains(key)

    def holds(self, key: Key) -> bool:
        """See `tiers.protocol.TellsOwn`: whether it is on disk."""
        return not self._closed and self._on_disk(key)

    def lacks(self, key: Key) -> bool:
        """See `tiers.protocol.TellsOwn`; a disk that fails is given nothing."""
        return self._disk_works() and not self._disk.contains(key)

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
            self._outgoing.add(payloads)
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
        try:
            self._disk.remove(gone)
        finally:
            self._outgoing.remove(gone)

    def clear(self) -> None:
        """Forgets every block of this keyspace in both, for every host.

        Raises:
            TierError: one of them failed; both were asked.
            ClosedError: the tier was closed.
        """
        self._demand_open()
        try:
            self._disk.clear()
        finally:
            self._outgoing.clear()

    def tell_evictions(self, tell: Callable[[Sequence[Key]], None]) -> None:
        """See `tiers.protocol.TellsEvictions`; tells of the disk's."""
        self._disk.tell_evictions(tell)

    def list_blocks(self, *, newest_first: bool = False) -> Iterator[ListedBlock]:
        """See `tiers.protocol.Lists`; names the disk's blocks."""
        return self._disk.list_blocks(newest_first=newest_first)

    def space(self) -> Space:
        """See `tiers.protocol.TellsSpace`: the disk's."""
        return self._disk.space()

    def read_totals(self) -> Mapping[Tier, ReadTotals]:
        """See `tiers.protocol.Stacked`."""
        return {Tier.SSD: self._disk_meter.totals(), Tier.REMOTE: self._remote.read_totals()}

    def stats(self) -> OutgoingStats:
        """What waits for the remote, and became of what waited."""
        return self._outgoing.stats()

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
        return self._outgoing.wait_done(timeout_s)

    def close(self) -> None:
        """Sends what still waits, for two seconds at most, and closes both. Idempotent.

        Raises:
            TierError: the disk failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._disk.close()  # first: whoever closes us may not wait for the remote
        finally:
            self._outgoing.close(_DRAIN_S)
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
        self.disk_failures += 1
        if not isinstance(error, TierFullError):
            self._disk_rests_until_s = self._clock() + _REST_S
            _log.warning("ssd rests for %.0f s: %s", _REST_S, error)

    def _demand_open(self) -> None:
        if self._closed:
            raise ClosedError("the tier was closed")
