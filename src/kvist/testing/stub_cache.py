"""The prefix cache of a stub engine: which blocks it has, told as vLLM tells it.

Its hashes are its own, from start to start. The oldest blocks go first when it is full, those of a
prompt from its end on, as with vLLM.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:  # an engine that publishes nothing starts without
    from kvist.cluster.log import Sealed
    from kvist.node.events import EventPorts

_TOPIC = b"kv@stub@model"


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What a stub engine keeps, and where it says so.

    Attributes:
        block_tokens: of its blocks; 0: it keeps nothing.
        blocks: most blocks that it keeps.
        events: ZMQ endpoint where it publishes; empty: nowhere.
        replay: where it replays what it still has of that; empty: nowhere.
        buffer: most messages that it can replay.
    """

    block_tokens: int = 0
    blocks: int = 1 << 16
    events: str = ""
    replay: str = ""
    buffer: int = 1000


class StubCache:
    """For one thread."""

    def __init__(self, spec: CacheSpec) -> None:
        """Binds the endpoints, if there are any.

        Raises:
            OSError: an endpoint cannot be bound.
        """
        self._spec = spec
        self._salt = secrets.token_bytes(8)
        self._blocks: OrderedDict[bytes, None] = OrderedDict()  # the one to go first in front
        self._buffer: deque[Sealed] = deque(maxlen=spec.buffer)
        self._next = 0
        self._to_lose = 0
        self._ports: EventPorts | None = None
        if spec.events:
            from kvist.node.events import EventPorts

            self._ports = EventPorts(spec.events, spec.replay or "tcp://127.0.0.1:*")

    @property
    def events(self) -> tuple[str, str]:
        """Where it publishes and replays; empty where it does not."""
        ports = self._ports
        if ports is None:
            return "", ""
        return ports.events, ports.replay if self._spec.replay else ""

    def compute(self, tokens: Sequence[int]) -> int:
        """A prompt is computed; returns how many of its tokens were here."""
        width = self._spec.block_tokens
        if not width:
            return 0
        names = self._names(tokens, width)
        held = 0
        while held < len(names) and names[held] in self._blocks:
            held += 1
        for name in reversed(names):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        gone = [self._blocks.popitem(last=False)[0] for _ in range(self._excess)]
        events: list[dict[str, Any]] = []
        if held < len(names):
            events.append(self._stored(names, tokens, held))
        if gone:
            events.append({"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU"})
        self._publish(events)
        return min(held * width, max(0, len(tokens) - 1))

    def clear(self) -> None:
        """Nothing is here any more."""
        self._blocks.clear()
        self._publish([{"type": "AllBlocksCleared"}])

    def lose(self, messages: int) -> None:
        """The next messages reach nobody, but can be replayed."""
        self._to_lose = messages

    def answer(self) -> None:
        """Replays to whoever has asked."""
        if self._ports is not None:
            self._ports.answer(
                _TOPIC, lambda number: [s for s in self._buffer if s.number >= number]
            )

    def close(self) -> None:
        """Lets go of the endpoints."""
        if self._ports is not None:
            self._ports.close()

    @property
    def _excess(self) -> int:
        return max(0, len(self._blocks) - self._spec.blocks)

    def _names(self, tokens: Sequence[int], width: int) -> list[bytes]:
        names, above = [], self._salt
        for first in range(0, len(tokens) - width + 1, width):
            words = repr(list(tokens[first : first + width])).encode()
            above = hashlib.sha256(above + words).digest()
            names.append(above)
        return names

    def _stored(self, names: Sequence[bytes], tokens: Sequence[int], held: int) -> dict[str, Any]:
        width = self._spec.block_tokens
        return {
            "type": "BlockStored",
            "block_hashes": list(names[held:]),
            "parent_block_hash": names[held - 1] if held else None,
            "token_ids": list(tokens[held * width : len(names) * width]),
            "block_size": width,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
        }

    def _publish(self, events: list[dict[str, Any]]) -> None:
        if self._ports is None or not events:
            return
        from kvist.cluster.log import Sealed

        sealed = Sealed(self._next, msgspec.msgpack.encode([0.0, events, 0]))
        self._next += 1
        self._buffer.append(sealed)
        if self._to_lose:
            self._to_lose -= 1
        else:
            self._ports.publish(_TOPIC, [sealed])
