"""`LowerTier` over any storage adapter: what a host stored, every host can read.

An object is a frame (`codec/frame.py`) named by keyspace and key, and proven on arrival: a damaged,
cut or swapped object is a counted miss. Several calls are under way at once, each with some blocks
of a batch, whose bytes go straight into the slots. `contains` is a dictionary look-up; how the
dictionary comes to know what other hosts stored is told in `learner.py`. Objects may vanish at any
moment, by the medium's own eviction or another host's: that is a miss, and nothing more.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvist.adapters.crew import Crew
from kvist.adapters.layers import Operation, OperationCounts
from kvist.adapters.protocol import Got, NewObject, Put, PutReport, StorageAdapter
from kvist.codec.registry import CodecRegistry
from kvist.core.errors import ClosedError, ConfigError, TierError, TierFullError
from kvist.core.keys import KEY_BYTES, Key
from kvist.core.outcome import Outcome, ReadTotals
from kvist.tiers.busy import BusyMeter
from kvist.tiers.encoding import encoded
from kvist.tiers.protocol import Payload
from kvist.tiers.remote.frames import Arrival, MissCause, Names, framed
from kvist.tiers.remote.knowledge import Knowledge
from kvist.tiers.remote.learner import LearnCounts, Learner, LearnLimits
from kvist.tiers.remote.traffic import Traffic

DEFAULT_CONNECTIONS = 4
_CALL_BYTES = 4 << 20  # blocks in one call, together
_CALL_BLOCKS = 32
_DELETE_NAMES = 500
_LOOK_S = 5.0  # between two looks at calls that have not come back
_MOST_PAGES = 1_000_000

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """Counters since open, and how much is known now."""

    known_blocks: int
    stored: int
    present: int
    hits: int
    misses_by_cause: Mapping[MissCause, int]
    learned: LearnCounts
    available: bool


class RemoteTier:
    """Blocks in a store that hosts share. Thread-safe."""

    def __init__(
        self,
        adapter: StorageAdapter,
        *,
        keyspace: bytes,
        connections: int = DEFAULT_CONNECTIONS,
        limits: LearnLimits | None = None,
        codecs: CodecRegistry | None = None,
        available: Callable[[], bool] = lambda: True,
        counts: Callable[[], Mapping[Operation, OperationCounts]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Owns `adapter`; starts to learn what is there.

        Args:
            adapter: the medium, in whatever layers; its calls end at a deadline of their own.
            keyspace: the fingerprint (32 bytes) that names and frames bear.
            connections: reads that may be under way at once, and half as many writes.
            limits: how it learns what others stored.
            codecs: how blocks are encoded, and which can be read.
            available: whether the medium can be expected to answer; while not, nothing is present.
            counts: what the adapter's calls came to, for `samples`.
            clock: seconds that only grow.

        Raises:
            ConfigError: `keyspace` is no fingerprint, or there is no connection.
        """
        if len(keyspace) != KEY_BYTES:
            raise ConfigError(f"a keyspace fingerprint has {KEY_BYTES} bytes, not {len(keyspace)}")
        if connections < 1:
            raise ConfigError(f"a remote tier needs a connection, not {connections}")
        limits = limits or LearnLimits()
        self._adapter = adapter
        self._names = Names(keyspace)
        self._connections = connections
        self._codecs = codecs or CodecRegistry()
        self._available = available
        self._counts = counts
        self._traffic = Traffic()
        self._meter = BusyMeter(clock)
        self._knowledge = Knowledge(
            most_blocks=limits.most_blocks, absent_s=limits.absent_s, clock=clock
        )
        self._readers = Crew(connections, name="kvist-remote-read")
        # Apart: what is read must not wait behind what is written.
        self._writers = Crew(max(1, connections // 2), name="kvist-remote-write")
        self._closed = False
        self._tell: Callable[[Sequence[Key]], None] | None = None
        self._learner = Learner(adapter, self._knowledge, self._names, limits, available=available)

    def contains(self, key: Key) -> bool:
        """Whether `key` is believed present; a key that is not known is asked for later."""
        if self._closed or not self._available():
            return False
        if self._knowledge.is_present(key):
            return True
        if self._knowledge.unknown((key,)):
            self._learner.note(key)
        return False

    def contains_run(self, keys: Sequence[Key]) -> int:
        """How many keys from the first on are present; may wait for a probe, see `learner.py`."""
        if self._closed or not self._available():
            return 0
        return self._learner.run(keys)

    def available(self) -> bool:
        """Whether the medium can be expected to answer."""
        return not self._closed and self._available()

    def known_run(self, keys: Sequence[Key]) -> int:
        """As `contains_run`, without ever waiting."""
        return 0 if self._closed or not self._available() else self._knowledge.run(keys)

    def keeps(self, key: Key) -> bool:
        """See `tiers.protocol.TellsOwn`."""
        return self.contains(key)

    def holds(self, key: Key) -> bool:
        """See `tiers.protocol.TellsOwn`: nothing, it is shared with other hosts."""
        del key
        return False

    def lacks(self, key: Key) -> bool:
        """See `tiers.protocol.TellsOwn`: nothing, what was read from here is here."""
        del key
        return False

    def put(self, payloads: Sequence[Payload]) -> None:
        """Stores blocks; the first writer, on whatever host, wins.

        Raises:
            TierFullError: no space even after eviction.
            TierError: the medium failed; what was not stored is absent.
            FormatError: a block is not of the layout that the codecs are for.
            ClosedError: the tier was closed.
        """
        self._demand_open()
        chosen: dict[Key, Payload] = {}
        for payload in payloads:
            chosen.setdefault(payload.key, payload)
        calls: list[tuple[dict[Key, int], Future[PutReport]]] = []
        for part in _parts(list(chosen.values()), lambda p: p.data.nbytes):
            objects = [framed(encoded(p, self._codecs), self._names) for p in part]
            sizes = {p.key: o.size_bytes for p, o in zip(part, objects, strict=True)}
            calls.append((sizes, self._submit_put(objects)))
        failure: TierError | None = None
        for sizes, call in calls:
            try:
                self._stored(sizes, _settled(call))
            except TierError as error:
                if failure is None or isinstance(error, TierFullError):
                    failure = error
        if failure is not None:
            raise failure

    def read_into(self, key: Key, out: memoryview) -> Outcome:
        """Reads and proves one block. On a `MISS` the bytes of `out` are undefined.

        Raises:
            TierError: the medium failed.
            ClosedError: the tier was closed.
        """
        self._demand_open()
        (outcome,) = self._read([(key, out)])
        return outcome

    def read_many(
        self, items: Sequence[tuple[Key, memoryview]]
    ) -> Iterator[tuple[int, Outcome | TierError]]:
        """Reads and proves many blocks; see `BatchReader`. The calls begin at once.

        Raises:
            ClosedError: the tier was closed.
        """
        self._demand_open()
        reads = self._read_parts(items)
        next(reads)  # all calls are under way, and are waited for even if nobody iterates
        return reads

    def remove(self, keys: Iterable[Key]) -> None:
        """Deletes blocks, for every host.

        Raises:
            TierError: the medium failed; some may be gone.
            ClosedError: the tier was closed.
        """
        self._demand_open()
        gone = list(keys)
        self._knowledge.drop(gone)
        for start in range(0, len(gone), _DELETE_NAMES):
            self._adapter.delete([self._names.name(k) for k in gone[start : start + _DELETE_NAMES]])
        self._knowledge.drop(gone)

    def clear(self) -> None:
        """Deletes every block of this keyspace, for every host.

        Raises:
            TierError: the medium failed; some may be gone.
            ClosedError: the tier was closed.
        """
        self._demand_open()
        known = self._knowledge.keys()
        cursor: str | None = None
        for _ in range(_MOST_PAGES):
            page = self._adapter.list_page(self._names.prefix, cursor=cursor, limit=_DELETE_NAMES)
            self._adapter.delete([entry.name for entry in page.entries])
            cursor = page.cursor
            if cursor is None:
                break
        if page.partial:
            self.remove(known)
            text = "a remote that cannot list was cleared of what this host knew of"
            raise TierError(errno.ENOTSUP, text)
        self._knowledge.clear()

    def tell_evictions(self, tell: Callable[[Sequence[Key]], None]) -> None:
        """See `tiers.protocol.TellsEvictions`; of what other hosts evict nothing is told."""
        self._tell = tell

    def wait_listed(self, timeout_s: float) -> bool:
        """Whether the first listing of what is there has ended within the time."""
        return self._learner.wait_listed(timeout_s)

    def read_totals(self) -> ReadTotals:
        """Bytes that arrived, and the time in which reads were under way."""
        return self._meter.totals()

    def stats(self) -> RemoteStats:
        """Counters now."""
        return RemoteStats(
            known_blocks=len(self._knowledge),
            stored=self._traffic.stored,
            present=self._traffic.present,
            hits=self._traffic.hits,
            misses_by_cause=self._traffic.misses(),
            learned=self._learner.counts,
            available=self._available(),
        )

    def samples(self) -> Mapping[str, float]:
        """See `tiers.protocol.Sampled`."""
        found = {
            "kvist_remote_known_blocks": float(len(self._knowledge)),
            "kvist_remote_resting": float(not self._available()),
        }
        for cause, count in self._traffic.misses().items():
            found[f"kvist_remote_misses_total.{cause.value}"] = float(count)
        for operation, counts in self._counts().items():
            of = operation.value
            found[f"kvist_remote_calls_total.{of}"] = float(counts.calls)
            found[f"kvist_remote_failures_total.{of}"] = float(counts.failed)
            found[f"kvist_remote_seconds_total.{of}"] = counts.seconds
            if operation in (Operation.GET, Operation.PUT):
                found[f"kvist_remote_bytes_total.{of}"] = float(counts.moved_bytes)
        return found

    def close(self) -> None:
        """Ends the threads and closes the adapter. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._learner.stop()
        self._readers.close()
        self._writers.close()
        self._adapter.close()
        self._knowledge.clear()

    def _submit_put(self, objects: Sequence[NewObject]) -> Future[PutReport]:
        return self._writers.submit(lambda: self._adapter.put(objects))

    def _stored(self, sizes: Mapping[Key, int], report: PutReport) -> None:
        outcomes = zip(sizes.items(), report.outcomes, strict=True)
        # What was there may be encoded otherwise.
        self._knowledge.add({k: size if o is Put.STORED else 0 for (k, size), o in outcomes})
        gone = [k for name in report.evicted if (k := self._names.key(name)) is not None]
        stored = report.outcomes.count(Put.STORED)
        self._traffic.put(stored=stored, present=len(sizes) - stored)
        if gone:
            self._knowledge.drop(gone)
            if self._tell is not None:
                self._tell(gone)

    def _shares(self, items: Sequence[tuple[Key, memoryview]]) -> list[list[int]]:
        """Indices of `items` for each call: small ones together, and every connection busy."""
        fair = -(-len(items) // self._connections)
        most = min(fair, _CALL_BLOCKS)
        return list(_parts(range(len(items)), lambda i: items[i][1].nbytes, most=most))

    def _read(self, items: Sequence[tuple[Key, memoryview]]) -> list[Outcome]:
        """Reads and proves some blocks in one call; an object of a surprising size in another."""
        with self._meter.busy():
            arrivals = [self._arrival(key, out) for key, out in items]
            fetched = self._adapter.get([a.wanted for a in arrivals])
            outcomes = []
            for (key, out), arrival, answer in zip(items, arrivals, fetched, strict=True):
                cause: MissCause | None = MissCause.ABSENT
                if answer.got is Got.SIZE:
                    cause = arrival.expect(answer.size_bytes)
                    if cause is None:
                        (answer,) = self._adapter.get([arrival.wanted])
                        cause = MissCause.ABSENT
                if answer.got is Got.HIT:
                    cause = arrival.prove()
                outcomes.append(self._settle(key, out, cause, answer.size_bytes))
            return outcomes

    def _arrival(self, key: Key, out: memoryview) -> Arrival:
        size_bytes = self._knowledge.size_bytes(key)
        return Arrival(key, out, self._names, self._codecs, size_bytes=size_bytes)

    def _settle(
        self, key: Key, out: memoryview, cause: MissCause | None, size_bytes: int
    ) -> Outcome:
        if cause is None:
            self._knowledge.add({key: size_bytes})
            self._traffic.hit()
            self._meter.count(out.nbytes)
            return Outcome.HIT
        self._traffic.miss(cause)
        if cause is not MissCause.SIZE:
            self._knowledge.drop((key,))
        if cause.is_damage:
            self._learner.discard(key)
        return Outcome.MISS

    def _read_parts(
        self, items: Sequence[tuple[Key, memoryview]]
    ) -> Iterator[tuple[int, Outcome | TierError]]:
        """Begins every call, yields once for that, and then what became of each block."""
        calls: dict[Future[list[Outcome]], Sequence[int]] = {}
        left: set[Future[list[Outcome]]] = set()
        try:
            for part in self._shares(items):
                call = self._readers.submit(partial(self._read, [items[i] for i in part]))
                calls[call] = part
                left.add(call)
            yield -1, Outcome.PENDING
            while left:
                done, left = wait(left, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                for call in done:
                    outcomes: Sequence[Outcome | TierError]
                    try:
                        outcomes = call.result(timeout=0)
                    except TierError as error:
                        outcomes = [error] * len(calls[call])
                    yield from zip(calls[call], outcomes, strict=True)
        finally:
            left = {call for call in left if not call.cancel()}
            while left:  # the buffers are theirs until they are back
                _, left = wait(left, timeout=_LOOK_S)

    def _demand_open(self) -> None:
        if self._closed:
            raise ClosedError("the remote tier was closed")


def _settled(call: Future[PutReport]) -> PutReport:
    """What a call came to; its deadline is the adapter's, its payload is needed until then."""
    while not call.done():
        wait([call], timeout=_LOOK_S)
    return call.result(timeout=0)


def _parts(
    things: Sequence[_T], size_of: Callable[[_T], int], *, most: int = _CALL_BLOCKS
) -> Iterator[list[_T]]:
    """Runs of `things` that one call takes."""
    part: list[_T] = []
    part_bytes = 0
    for thing in things:
        size_bytes = size_of(thing)
        if part and (len(part) >= most or part_bytes + size_bytes > _CALL_BYTES):
            yield part
            part, part_bytes = [], 0
        part.append(thing)
        part_bytes += size_bytes
    if part:
        yield part
