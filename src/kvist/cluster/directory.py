"""Which node has which block, as far as this reader has heard. Soft state: wrong means a miss.

A `Directory` follows the streams of any number of publishers (`follower.py`) into one table
(`native.OwnerTable`). A dead or restarted publisher's entries go at once. A read that finds a block
missing corrects the table, unless the table knows something newer than the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvist.cluster.follower import Ask, Follower, Patience, Progress
from kvist.cluster.wire import Batch
from kvist.core.events import Cleared, KvEvent, Removed, Stored
from kvist.core.keys import Key
from kvist.core.outcome import Tier
from kvist.native import OwnerTable

_TIERS = tuple(Tier)
BIT_OF = {tier: 1 << n for n, tier in enumerate(_TIERS)}
_ALL_TIERS = sum(BIT_OF.values())
_FETCHABLE = BIT_OF[Tier.DRAM] | BIT_OF[Tier.SSD]
MOST_NODES = 1024


@dataclass(frozen=True, slots=True)
class Holder:
    """A node that has a block, and the fastest tier that it has it in."""

    node: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a publisher's stream: its answers hold for what it had sealed by then."""

    incarnation: int
    number: int


@dataclass(slots=True)
class Counts:
    """What a directory counts since it was made."""

    batches: int = 0
    asks: int = 0
    restarts: int = 0
    corrections: int = 0
    refused_nodes: int = 0
    gone_gaps: int = 0  # of followers that are gone


@dataclass(slots=True)
class _Source:
    follower: Follower
    number: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a directory: keys that it knows at most, and how long it waits for whom."""

    most_keys: int = 1 << 23
    patience: Patience = field(default_factory=Patience)


def no_pause() -> None:
    """Goes on at once."""


class Directory:
    """Key → holders. Not thread-safe: the caller's lock, but for `fetchable`."""

    def __init__(
        self, limits: Limits | None = None, *, pause: Callable[[], None] = no_pause
    ) -> None:
        """`pause` is called between two events, and may let others have the caller's lock."""
        limits = limits or Limits()
        self._pause = pause
        self._patience = limits.patience
        self._table = OwnerTable(limits.most_keys)
        self._sources: dict[str, _Source] = {}
        self._names: list[str | None] = []
        self._numbering = 0  # goes up whenever a publisher gets or loses its number
        self._asking: dict[str, Follower] = {}  # those that may have something to ask
        self.counts = Counts()

    def __len__(self) -> int:
        """Keys that somebody has."""
        return len(self._table)

    @property
    def memory_bytes(self) -> int:
        """What the table takes."""
        return self._table.memory_bytes

    @property
    def evicted(self) -> int:
        """Keys that went because the table was full."""
        return self._table.evicted

    @property
    def gaps(self) -> int:
        """Gaps that were found in streams."""
        return self.counts.gone_gaps + sum(s.follower.gaps for s in self._sources.values())

    def take(self, batch: Batch, now_s: float) -> None:
        """Applies a message, or holds it until those before it are there."""
        source = self._sources.get(batch.node) or self._source(batch.node)
        if source is None:
            return
        self._advance(source, source.follower.take(batch, now_s))

    def answered(self, node: str, now_s: float) -> None:
        """A publisher has sent all that it has of what it was asked for, or cannot be asked."""
        source = self._sources.get(node)
        if source is not None:
            self._advance(source, source.follower.leap(now_s))

    def reconnected(self, node: str, now_s: float) -> None:
        """The connection to a publisher broke, and there is one again.

        A Kvist node says which start of it speaks. A stock engine does not, so nothing that it said
        before counts, and all is asked for that it still has.
        """
        source = self._sources.get(node)
        if source is None or source.follower.incarnation:
            return
        self._void(source.number)
        self.counts.restarts += 1
        source.follower.anew(now_s)
        self._asking[node] = source.follower

    def _advance(self, source: _Source, progress: Progress) -> None:
        if source.follower.complete:
            if self._asking:
                self._asking.pop(source.follower.node, None)
        else:
            self._asking[source.follower.node] = source.follower
        if progress.restarted:
            self._void(source.number)
            self.counts.restarts += 1
        for ready in progress.batches:
            self.counts.batches += 1
            for event in ready.events:
                if self._sources.get(source.follower.node) is not source:
                    return  # it went in a pause
                self._apply(source.number, event)
                self._pause()

    def expect(self, node: str, incarnation: int, newest: int, now_s: float) -> None:
        """A publisher is said to have published up to `newest`; what lacks is asked for."""
        source = self._source(node)
        if source is None:
            return
        if incarnation > source.follower.incarnation:
            self._void(source.number)
        source.follower.expect(incarnation, newest, now_s)
        if not source.follower.complete:
            self._asking[node] = source.follower

    def asks(self, now_s: float) -> list[Ask]:
        """What to ask publishers for now, so that gaps close."""
        for follower in [f for f in self._asking.values() if f.is_unanswered(now_s)]:
            self._advance(self._sources[follower.node], follower.leap(now_s))
        asks = [a for f in self._asking.values() if (a := f.ask(now_s)) is not None]
        self.counts.asks += len(asks)
        return asks

    def drop(self, node: str) -> None:
        """A publisher is gone: nothing of it counts, and it is followed no more."""
        source = self._sources.pop(node, None)
        self._asking.pop(node, None)
        if source is not None:
            self._void(source.number)
            self._names[source.number] = None
            self._numbering += 1
            self.counts.gone_gaps += source.follower.gaps

    def disbelieve(self, node: str, key: Key, at: Position) -> bool:
        """A node answered at `at` that it has no such block; whether that changed anything.

        An answer from before what has been applied since says nothing, and so does one of another
        start: the stream is then the newer word.
        """
        source = self._sources.get(node)
        if source is None:
            return False
        follower = source.follower
        if at.incarnation != follower.incarnation or follower.last > at.number:
            return False
        if all(number != source.number for number, _ in self._table.find(key)):
            return False
        self._table.remove(source.number, _ALL_TIERS, [key])
        self.counts.corrections += 1
        return True

    def holders(self, key: Key) -> list[Holder]:
        """Who has a block, those that have it in the fastest tier first, then by name."""
        found = []
        for number, bits in self._table.find(key):
            name, held = self._names[number], bits & _ALL_TIERS
            if name is not None and held:
                found.append(((held & -held).bit_length() - 1, name))
        return [Holder(name, _TIERS[tier]) for tier, name in sorted(found)]

    def fetchable(self, key: Key) -> list[str]:
        """Nodes that have a block where another node can fetch it: in DRAM or on SSD.

        May be called on any thread: it is one look into the table. A node that comes or goes at
        that moment may be named wrongly, which costs a miss.
        """
        found = []
        for number, bits in self._table.find(key):
            name = self._names[number]
            if bits & _FETCHABLE and name is not None:
                found.append(name)
        return found

    def reach(self, keys: Sequence[Key]) -> dict[str, int]:
        """For each node that has the first key: how many blocks it has from there without a gap."""
        runs = ((self._names[number], run) for number, run in self._table.runs(keys, _ALL_TIERS))
        return {name: run for name, run in runs if name is not None}

    @property
    def complete(self) -> bool:
        """Whether everything that was heard of has been applied."""
        return not self._asking

    def nodes(self) -> list[str]:
        """The publishers that are followed."""
        return list(self._sources)

    def position(self, node: str) -> Position | None:
        """How far a publisher's stream has been applied."""
        source = self._sources.get(node)
        if source is None:
            return None
        return Position(source.follower.incarnation, source.follower.last)

    def contents(self) -> Iterator[tuple[bytes, dict[str, frozenset[Tier]]]]:
        """Every key (its first 16 bytes) and its holders with all their tiers."""
        for tag, owners in self._table.items():
            yield (
                tag,
                {
                    name: frozenset(t for t, bit in BIT_OF.items() if bits & bit)
                    for number, bits in owners
                    if bits & _ALL_TIERS and (name := self._names[number]) is not None
                },
            )

    def _apply(self, number: int, event: KvEvent) -> None:
        """Changes the table by what a publisher says; keys mean the same to everybody."""
        if isinstance(event, Stored):
            self._table.add(number, BIT_OF[event.tier], event.keys)
        elif isinstance(event, Removed):
            self._table.remove(number, BIT_OF[event.tier], event.keys)
        elif isinstance(event, Cleared):
            self._void(number)

    def _void(self, number: int) -> None:
        """Nothing of a publisher counts any more."""
        self._table.drop(number)

    def _source(self, node: str) -> _Source | None:
        source = self._sources.get(node)
        if source is not None:
            return source
        if len(self._sources) >= MOST_NODES:
            self.counts.refused_nodes += 1
            return None
        number = self._free_number()
        self._names[number] = node
        self._numbering += 1
        source = self._sources[node] = _Source(self._follower(node), number)
        return source

    def _follower(self, node: str) -> Follower:
        return Follower(node, self._patience)

    def _free_number(self) -> int:
        for number, name in enumerate(self._names):
            if name is None:
                return number
        self._names.append(None)
        return len(self._names) - 1
