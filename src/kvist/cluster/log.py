"""What a node publishes: numbered batches, a bounded buffer to replay, and dumps.

Events wait until they are *sealed* into a batch, which takes the next number. What is present is
kept up to date at sealing, never before, so a dump is by construction the state after the batch
whose number it takes (its watermark), whatever happens meanwhile. Not thread-safe: the caller's
lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvist.cluster.record import NodeRecord
from kvist.cluster.wire import encode_payload
from kvist.core.events import Cleared, KvEvent, Removed, Stored
from kvist.core.keys import Key
from kvist.core.outcome import Tier

_BIT_OF = {tier: 1 << n for n, tier in enumerate(Tier)}
_MOST_DUMP_RUN = 4096  # blocks of one event of a dump


@dataclass(frozen=True, slots=True)
class Sealed:
    """A batch as it is published."""

    number: int
    payload: bytes


@dataclass(slots=True)
class _Held:
    """A present block: its parent, and the tiers that it is in, as bits."""

    parent: Key | None
    tiers: int


class EventLog:
    """The stream of one start of one node. The first batch is `AllBlocksCleared`."""

    def __init__(
        self,
        *,
        block_tokens: int,
        most_batches: int = 10_000,
        most_pending: int = 4096,
        tell: Callable[[KvEvent, bytes], None] | None = None,
    ) -> None:
        """An empty stream.

        Args:
            block_tokens: tokens of a block.
            most_batches: batches kept for replay.
            most_pending: events that may wait; `overdue` says that there are as many.
            tell: is told every event that is sealed, in order, and its keyspace.

        Raises:
            ValueError: a limit below 1.
        """
        if min(block_tokens, most_batches, most_pending) < 1:
            raise ValueError("block_tokens, most_batches and most_pending are at least 1")
        self._block_tokens = block_tokens
        self._most_pending = most_pending
        self._tell = tell
        self._present: dict[bytes, dict[Key, _Held]] = {}
        self._pending: list[tuple[KvEvent, bytes]] = []
        self._buffer: deque[Sealed] = deque(maxlen=most_batches)
        self._dump: Sealed | None = None
        self._next = 0
        self.dumps = 0

    @property
    def number(self) -> int:
        """The number of the newest batch; -1 before the first."""
        return self._next - 1

    @property
    def pending(self) -> int:
        """Events that no batch holds yet."""
        return len(self._pending)

    @property
    def overdue(self) -> bool:
        """Whether the caller should seal before it records more."""
        return len(self._pending) >= self._most_pending

    def record(self, event: KvEvent, scope: bytes = b"") -> None:
        """Takes an event of the keyspace `scope`; a `Cleared` clears that keyspace only."""
        self._pending.append((event, scope))

    def seal(self, now_s: float, record: NodeRecord | None = None) -> Sealed:
        """Makes a batch of what waits, of nothing too, and numbers it.

        Args:
            now_s: wall-clock time, for people.
            record: what the node says of itself, if it is time to.
        """
        events: list[KvEvent] = [] if self._next else [Cleared()]
        if events and self._tell is not None:
            self._tell(events[0], b"")
        for event, scope in self._pending:
            carried_out = list(self._carried_out(event, scope))
            events += carried_out
            if self._tell is not None:
                for sealed_event in carried_out:
                    self._tell(sealed_event, scope)
        self._pending.clear()
        payload = encode_payload(events, ts=now_s, block_tokens=self._block_tokens, record=record)
        sealed = Sealed(self._next, payload)
        self._next += 1
        self._buffer.append(sealed)
        return sealed

    def since(self, number: int, now_s: float) -> list[Sealed]:
        """Batches that bring a reader up to date who has all below `number`.

        If the buffer begins later, the first is a dump; dumps are made again only when the buffer
        no longer leads on from the last one. Empty if there is nothing newer.
        """
        oldest = self._buffer[0].number if self._buffer else 0
        if number >= oldest:
            return [batch for batch in self._buffer if batch.number >= number]
        dump = self._dump
        if dump is None or dump.number + 1 < oldest:
            dump = self._dump = self._made_dump(now_s)
        return [dump, *(batch for batch in self._buffer if batch.number > dump.number)]

    def buffered(self, number: int) -> Sealed | None:
        """A batch that can still be replayed."""
        oldest = self._buffer[0].number if self._buffer else self._next
        return self._buffer[number - oldest] if oldest <= number < self._next else None

    def present(self) -> Iterator[tuple[Key, frozenset[Tier]]]:
        """Every block and its tiers as of the newest batch."""
        for blocks in self._present.values():
            for key, held in blocks.items():
                yield key, frozenset(tier for tier, bit in _BIT_OF.items() if held.tiers & bit)

    def _carried_out(self, event: KvEvent, scope: bytes) -> Iterator[KvEvent]:
        """Brings `_present` up to date; yields what readers have to know."""
        blocks = self._present.setdefault(scope, {})
        if isinstance(event, Stored):
            parent, bit = event.parent, _BIT_OF[event.tier]
            for key in event.keys:
                held = blocks.get(key)
                if held is None:
                    blocks[key] = _Held(parent, bit)
                else:
                    held.tiers |= bit
                parent = key
            yield event
        elif isinstance(event, Removed):
            bit = _BIT_OF[event.tier]
            for key in event.keys:
                held = blocks.get(key)
                if held is not None:
                    held.tiers &= ~bit
                    if not held.tiers:
                        del blocks[key]
            yield event
        else:
            del self._present[scope]
            if not any(self._present.values()):
                yield event
            else:
                yield from _removals(blocks)

    def _made_dump(self, now_s: float) -> Sealed:
        events: list[KvEvent] = [Cleared()]
        for blocks in self._present.values():
            for tier, bit in _BIT_OF.items():
                events.extend(_runs(blocks, tier, bit))
        self.dumps += 1
        payload = encode_payload(events, ts=now_s, block_tokens=self._block_tokens)
        return Sealed(self.number, payload)


def _removals(blocks: dict[Key, _Held]) -> Iterator[KvEvent]:
    for tier, bit in _BIT_OF.items():
        keys = tuple(key for key, held in blocks.items() if held.tiers & bit)
        if keys:
            yield Removed(keys, tier)


def _runs(blocks: dict[Key, _Held], tier: Tier, bit: int) -> Iterator[KvEvent]:
    """The blocks of a tier, neighbours in a sequence together, in the order of their arrival."""
    run: list[Key] = []
    parent: Key | None = None
    for key, held in blocks.items():
        if not held.tiers & bit:
            continue
        if run and (held.parent != run[-1] or len(run) == _MOST_DUMP_RUN):
            yield Stored(tuple(run), parent, tier)
            run = []
        if not run:
            parent = held.parent
        run.append(key)
    if run:
        yield Stored(tuple(run), parent, tier)
