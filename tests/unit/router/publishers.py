"""Publishers for tests of the router: an engine that writes what vLLM does, and a Kvist node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvist.cluster.log import EventLog
from kvist.cluster.wire import NUMBER_BYTES, Batch, decode_message, topic_of
from kvist.core.events import KvEvent
from kvist.native import digest
from kvist.router.index import Lives, PrefixIndex

WIDTH = 4  # tokens of a block
FINGERPRINT = digest(b"model")


def new_index(**more: Any) -> PrefixIndex:
    return PrefixIndex(block_tokens=WIDTH, fingerprint=FINGERPRINT, **more)


def prompt(who: int, blocks: int) -> list[int]:
    return [1000 * who + n for n in range(blocks * WIDTH)]


class Engine:
    """A stock engine: it names blocks by hashes that no other process has."""

    def __init__(self, name: str, *, width: int = WIDTH) -> None:
        self.name = name
        self.width = width
        self._next = 0

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        """What it calls a prompt's blocks."""
        ends = range(self.width, len(tokens) + 1, self.width)
        return [digest(repr((self.name, tokens[:end])).encode()) for end in ends]

    def stored(
        self, tokens: Sequence[int], *, first: int = 0, last: int | None = None, **more: Any
    ) -> dict[str, Any]:
        """The event that blocks `first` to `last` of a prompt are there."""
        names = self.hashes(tokens)
        last = len(names) if last is None else last
        return {
            "type": "BlockStored",
            "block_hashes": names[first:last],
            "parent_block_hash": names[first - 1] if first else None,
            "token_ids": list(tokens[first * self.width : last * self.width]),
            "block_size": self.width,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
        } | more

    def removed(self, hashes: Sequence[bytes], medium: str = "GPU", **more: Any) -> dict[str, Any]:
        """The event that blocks have left a medium."""
        event = {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}
        return event | {"group_idx": 0} | more

    def says(self, *events: dict[str, Any]) -> Batch:
        """The next message, as a reader gets it."""
        payload = msgspec.msgpack.encode([0.0, list(events), 0])
        number = self._next.to_bytes(NUMBER_BYTES, "big")
        self._next += 1
        return decode_message(b"", number, payload, source=self.name)

    def restart(self) -> None:
        """Its numbers begin anew."""
        self._next = 0


class Node:
    """A Kvist node: its keys are everybody's."""

    def __init__(self, name: str, incarnation: int = 1, *, most_batches: int = 100) -> None:
        self.name, self.incarnation = name, incarnation
        self.log = EventLog(block_tokens=WIDTH, most_batches=most_batches)

    def says(self, *events: KvEvent) -> Batch:
        """The next message, as a reader gets it."""
        for event in events:
            self.log.record(event)
        return self._received(self.log.seal(0.0))

    def since(self, number: int) -> list[Batch]:
        """What it answers to an ask."""
        return [self._received(sealed) for sealed in self.log.since(number, 0.0)]

    def _received(self, sealed: Any) -> Batch:
        number = sealed.number.to_bytes(NUMBER_BYTES, "big")
        topic = topic_of(self.name, self.incarnation)
        return decode_message(topic, number, sealed.payload, source="")


__all__ = ["FINGERPRINT", "WIDTH", "Engine", "Lives", "Node", "new_index", "prompt"]
