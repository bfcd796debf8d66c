"""`LowerTier` over the DRAM and SSD of other nodes: what one of them has, this one reads.

Nothing is written: a `put` claims nothing, and what is read becomes a block of this node's store
like any other. What the others have is believed (`beliefs.py`, `directed.py`); a wrong belief costs
a miss. The blocks of a batch are shared out over the peers that are believed to have them, and over
the connections of each.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event

from kvist.core.errors import ClosedError, KvistError
from kvist.core.keys import Key
from kvist.core.outcome import Outcome
from kvist.node.peers import messages as m
from kvist.node.peers.beliefs import Beliefs
from kvist.node.peers.member import Item, Member, Settled
from kvist.tiers.protocol import Payload

_log = logging.getLogger(__name__)
_LOOK_S = 0.5
_LEAST_BYTES_PER_S = 16 << 20  # a peer that brings less is of no use
_ROUNDS = 2  # what one peer failed to bring is asked of another once


@dataclass(frozen=True, slots=True)
class _Share:
    """Blocks of a batch that one connection of one peer is to bring."""

    member: Member
    items: list[Item]

    @property
    def size_bytes(self) -> int:
        return sum(out.nbytes for _, _, out in self.items)


@dataclass(slots=True)
class _Batch:
    """One `read_many`: what has arrived, and who still holds buffers."""

    until: float
    arrived: SimpleQueue[list[Settled] | None] = field(default_factory=SimpleQueue)
    given_up: Event = field(default_factory=Event)
    calls: dict[Future[None], _Share] = field(default_factory=dict)
    asked: set[tuple[int, Member]] = field(default_factory=set)  # which block of whom

    def wanted(self) -> bool:
        return not self.given_up.is_set()


class PeerTier:
    """Blocks of one keyspace in other nodes. Thread-safe."""

    def __init__(
        self,
        beliefs: Beliefs,
        *,
        streams: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Owns the beliefs.

        Args:
            beliefs: which peers there are, and what they have.
            streams: connections to each that bring blocks at once.
            timeout_s: a batch ends after this and the time that its bytes may take.
            clock: seconds that only grow.
        """
        self.beliefs = beliefs
        self._streams, self._timeout_s, self._clock = streams, timeout_s, clock
        self._closed = False

    # -- what is known ----------------------------------------------------------------------

    def contains(self, key: Key) -> bool:
        """Whether a peer is believed to have `key`; one that nobody knows of is asked for later."""
        return not self._closed and bool(self.beliefs.owners(key, ask=True))

    def contains_run(self, keys: Sequence[Key]) -> int:
        """How many keys from the first on are with peers; may wait for a probe."""
        return 0 if self._closed else self.beliefs.run(keys, ask=True)

    def known_run(self, keys: Sequence[Key]) -> int:
        """As `contains_run`, without ever waiting or asking anybody."""
        return 0 if self._closed else self.beliefs.run(keys)

    # -- reading ----------------------------------------------------------------------------

    def put(self, payloads: Sequence[Payload]) -> None:
        """Does nothing: peers fetch what they want.

        Raises:
            ClosedError: the tier was closed.
        """
        self._demand_open()

    def read_into(self, key: Key, out: memoryview) -> Outcome:
        """Reads and proves one block; a peer that fails is a miss.

        Raises:
            ClosedError: the tier was closed.
        """
        return dict(self.read_many([(key, out)]))[0]

    def read_many(self, items: Sequence[tuple[Key, memoryview]]) -> Iterator[tuple[int, Outcome]]:
        """Reads and proves many blocks; see `BatchReader`. The calls begin at once.

        Raises:
            ClosedError: the tier was closed.
        """
        self._demand_open()
        reads = self._read([(i, key, out) for i, (key, out) in enumerate(items)])
        next(reads)
        return reads

    def _read(self, items: Sequence[Item]) -> Iterator[tuple[int, Outcome]]:
        """Begins every call, yields once for that, and then what became of each block."""
        size_bytes = sum(out.nbytes for _, _, out in items)
        batch = _Batch(self._clock() + self._timeout_s + size_bytes / _LEAST_BYTES_PER_S)
        left = {item[0]: item for item in items}
        try:
            calls = self._begin(batch, left.values())
            yield -1, Outcome.PENDING
            for n in range(_ROUNDS):
                for index, outcome in self._arrivals(batch, calls):
                    elsewhere = n + 1 < _ROUNDS and self._owners(batch, left[index])
                    if outcome is Outcome.HIT or not elsewhere:
                        del left[index]
                        yield index, outcome
                calls = self._begin(batch, left.values()) if n + 1 < _ROUNDS else 0
            yield from ((index, Outcome.MISS) for index in left)
        finally:
            self._end(batch)

    def _begin(self, batch: _Batch, items: Iterable[Item]) -> int:
        """Lets peers bring what they are believed to have; how many calls are under way."""
        calls = 0
        for share in self._shares(batch, items):
            bring = partial(self._bring, batch, share)
            with contextlib.suppress(ClosedError):  # that peer has just left
                batch.calls[share.member.crew.submit(bring)] = share
                share.member.book(share.size_bytes)
                calls += 1
        return calls

    def _bring(self, batch: _Batch, share: _Share) -> None:
        """Reads a share; on a thread of the member's. What is not settled has failed."""
        try:
            if batch.wanted() and share.member.readable():
                share.member.read(share.items, batch.arrived.put, batch.until, batch.wanted)
        except (KvistError, OSError) as error:  # the member has told its breaker, and the log
            _log.debug("peer %s: %s", share.member.name, error)
        finally:
            share.member.book(-share.size_bytes)
            batch.arrived.put(None)

    def _arrivals(self, batch: _Batch, calls: int) -> Iterator[tuple[int, Outcome]]:
        """What is settled, until `calls` shares are through."""
        while calls:
            try:
                arrival = batch.arrived.get(timeout=_LOOK_S)
            except Empty:
                continue  # every call ends by the batch's deadline
            if arrival is None:
                calls -= 1
            else:
                yield from arrival

    def _end(self, batch: _Batch) -> None:
        """The buffers are the calls' until they are back."""
        batch.given_up.set()
        left = set()
        for call, share in batch.calls.items():
            if not call.cancel():
                left.add(call)
            elif call.cancelled():
                share.member.book(-share.size_bytes)
        while left:
            _, left = wait(left, timeout=_LOOK_S)

    def _owners(self, batch: _Batch, item: Item) -> list[Member]:
        """Who is believed to have a block and was not asked for it yet."""
        owners = self.beliefs.owners(item[1])
        return [member for member in owners if (item[0], member) not in batch.asked]

    def _shares(self, batch: _Batch, items: Iterable[Item]) -> list[_Share]:
        """Blocks by the peer that brings them; what nobody is believed to have is left out."""
        by_member: dict[Member, list[Item]] = {}
        booked: dict[Member, int] = {}
        for item in items:
            owners = self._owners(batch, item)
            if owners:
                chosen = min(owners, key=lambda o: o.queued_bytes + booked.get(o, 0))
                batch.asked.add((item[0], chosen))
                by_member.setdefault(chosen, []).append(item)
                booked[chosen] = booked.get(chosen, 0) + item[2].nbytes
        shares = []
        for member, theirs in by_member.items():
            size = min(-(-len(theirs) // self._streams), m.MOST_READ_KEYS)
            shares += [
                _Share(member, theirs[start : start + size])
                for start in range(0, len(theirs), size)
            ]
        return shares

    # -- the rest ---------------------------------------------------------------------------

    def remove(self, keys: Iterable[Key]) -> None:
        """Forgets who has them; peers keep what is theirs.

        Raises:
            ClosedError: the tier was closed.
        """
        self._demand_open()
        self.beliefs.forget(keys)

    def clear(self) -> None:
        """Forgets who has what.

        Raises:
            ClosedError: the tier was closed.
        """
        self._demand_open()
        self.beliefs.forget(None)

    def samples(self) -> Mapping[str, float]:
        """See `tiers.protocol.Sampled`."""
        return self.beliefs.samples()

    def close(self) -> None:
        """Ends the threads and hangs up. Idempotent."""
        if not self._closed:
            self._closed = True
            self.beliefs.close()

    def _demand_open(self) -> None:
        if self._closed:
            raise ClosedError("the tier was closed")
