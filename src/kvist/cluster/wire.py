"""KV events as vLLM 0.32 publishes them, so that stock engines and stock routers take part.

A message is `[topic, number, payload]`: the number is 8 bytes big-endian, the payload the
MessagePack array `[ts, [event, ...], dp_rank]`, an event a map with its class under `type`. Three
things are ours, and each is valid for a reader that knows nothing of them:

* the topic is `kvist@NODE@INCARNATION` (16 hex digits), so that a restarted node's 0 is not taken
  for an old one;
* a batch that begins with `AllBlocksCleared` needs none before it. Number 0 of every start is such
  a batch, and so is a *dump*: everything cleared, then everything stored that is there after the
  batch of the same number, which it stands for;
* a fourth item of the array is the node's record now and then; a batch may have no events at all.

Keys are 32-byte strings; engines may also send 64-bit numbers, and their hashes of either kind mean
nothing to others: what they say of tokens, adapter and salt is kept beside (`core.events.Content`).
Tiers are media: GPU, CPU, and STORAGE, which is LOCAL (SSD) or REMOTE.

Source: `vllm/distributed/kv_events.py` of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvist.cluster.record import NodeRecord
from kvist.core.errors import FormatError
from kvist.core.events import Cleared, Content, KvEvent, Removed, Stored
from kvist.core.outcome import Tier
from kvist.native import block_keys, unpack_tokens

TOPIC_PREFIX = "kvist@"
NUMBER_BYTES = 8
END_NUMBER = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)  # ends a replay
MOST_PAYLOAD_BYTES = 1 << 28
_MOST_PUBLISHERS = 4096  # whose topics are remembered
_NO_TOKENS = msgspec.Raw(b"\x90")

_MEDIUM_OF = {
    Tier.HBM: ("GPU", None),
    Tier.DRAM: ("CPU", None),
    Tier.SSD: ("STORAGE", "LOCAL"),
    Tier.PEER: ("STORAGE", "PEER"),  # a locality of ours: others take it for LOCAL
    Tier.REMOTE: ("STORAGE", "REMOTE"),
}
_ELSEWHERE = {"PEER": Tier.PEER, "REMOTE": Tier.REMOTE}
_TIER_OF = {None: Tier.HBM, "GPU": Tier.HBM, "CPU": Tier.DRAM, "STORAGE": Tier.SSD}

BlockHash = bytes | int
BlockHashes = Annotated[list[BlockHash], Meta(max_length=1 << 24)]


class _Event(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag=True):
    """Common to all: a map with the class name under `type`."""


class BlockStored(_Event, frozen=True):
    """Consecutive blocks of a sequence became present; field for field vLLM's."""

    block_hashes: BlockHashes
    parent_block_hash: BlockHash | None
    token_ids: msgspec.Raw  # a list of integers, not unpacked
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: Any = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(_Event, frozen=True):
    """Blocks left a medium; field for field vLLM's."""

    block_hashes: BlockHashes
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(_Event, frozen=True):
    """Every block left every medium."""


class _Payload(msgspec.Struct, frozen=True, array_like=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class _PayloadAndRecord(_Payload, frozen=True):
    record: NodeRecord | None = None


class Batch(msgspec.Struct, frozen=True, gc=False):
    """What one message of a publisher says.

    Attributes:
        node: who publishes.
        incarnation: which start of it; 0 for a publisher that does not say.
        number: its place in the stream, from 0.
        events: in the order in which they happened.
        record: what the node says of itself, in some batches.
        replayed: whether it answers an ask, so that it may be an old one.
    """

    node: str
    incarnation: int
    number: int
    events: tuple[KvEvent, ...]
    record: NodeRecord | None = None
    replayed: bool = False

    @property
    def is_base(self) -> bool:
        """Whether it needs none before it."""
        return bool(self.events) and isinstance(self.events[0], Cleared)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_PayloadAndRecord)


def topic_of(node: str, incarnation: int) -> bytes:
    """The topic of a node's messages."""
    return f"{TOPIC_PREFIX}{node}@{incarnation:016x}".encode()


def encode_payload(
    events: Iterable[KvEvent], *, ts: float, block_tokens: int, record: NodeRecord | None = None
) -> bytes:
    """A payload that vLLM's `KVEventBatch` decodes. `ts`: wall-clock seconds, for people."""
    written = [_written(event, block_tokens) for event in events]
    if record is None:
        return _encoder.encode(_Payload(ts, written))
    return _encoder.encode(_PayloadAndRecord(ts, written, None, record))


def decode_message(
    topic: bytes, number: bytes, payload: bytes, *, source: str, replayed: bool = False
) -> Batch:
    """A message of a Kvist node or of a stock engine.

    Args:
        source: the name of the publisher if the topic does not say it.
        replayed: whether it answers an ask.

    Raises:
        FormatError: it is neither.
    """
    if len(number) != NUMBER_BYTES or number == END_NUMBER or len(payload) > MOST_PAYLOAD_BYTES:
        raise FormatError("not a message of KV events")
    node, incarnation = _publisher(topic, source)
    try:
        read = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"KV events that cannot be read: {error}") from error
    if read.record is not None and read.record.node != node:
        raise FormatError(f"{node} sends a record of {read.record.node}")
    events: list[KvEvent] = []
    for written in read.events:
        event = _read(written)
        if event is not None:
            events.append(event)
    count = int.from_bytes(number, "big")
    return Batch(node, incarnation, count, tuple(events), read.record, replayed)


@lru_cache(maxsize=_MOST_PUBLISHERS)
def _publisher(topic: bytes, source: str) -> tuple[str, int]:
    parts = topic.decode(errors="replace").split("@")
    if not topic.startswith(TOPIC_PREFIX.encode()):
        return source, 0
    try:
        _, node, incarnation = parts
        return node, int(incarnation, 16)
    except ValueError as error:
        raise FormatError(f"a topic of {topic!r}") from error


def _written(event: KvEvent, block_tokens: int) -> BlockStored | BlockRemoved | AllBlocksCleared:
    if isinstance(event, Cleared):
        return AllBlocksCleared()
    medium, locality = _MEDIUM_OF[event.tier]
    if isinstance(event, Removed):
        return BlockRemoved(list(event.keys), medium, locality=locality)
    return BlockStored(
        list(event.keys),
        event.parent,
        _NO_TOKENS,
        block_tokens,
        None,
        medium,
        None,
        locality=locality,
    )


def _read(event: BlockStored | BlockRemoved | AllBlocksCleared) -> KvEvent | None:
    """None for a medium that nobody here knows."""
    if isinstance(event, AllBlocksCleared):
        return Cleared()
    tier = _TIER_OF.get(event.medium)
    if tier is None:
        return None
    if event.locality is not None:
        elsewhere = _ELSEWHERE.get(event.locality)
        if elsewhere is not None and event.medium != "STORAGE":
            return None
        tier = elsewhere or tier
    keys = block_keys(event.block_hashes)
    group = event.group_idx or 0
    if isinstance(event, BlockRemoved):
        return Removed(keys, tier, group)
    parent = event.parent_block_hash
    above = block_keys([parent])[0] if parent is not None else None
    content = None if event.token_ids == _NO_TOKENS else _content(event)
    return Stored(keys, above, tier, content, group)


def _content(event: BlockStored) -> Content:
    try:
        tokens = unpack_tokens(event.token_ids)
    except ValueError as error:
        raise FormatError(f"tokens that cannot be read: {error}") from error
    lora, salt = event.lora_name or "", ""
    named = len(event.block_hashes)
    extras = event.extra_keys
    if extras is not None and (not isinstance(extras, list) or len(extras) != named):
        named = 0
    elif extras is not None:
        for block, extra in enumerate(extras):
            more = _beside_adapter(extra, lora)
            if block == 0 and event.parent_block_hash is None and len(more) == 1:
                salt = more[0] if isinstance(more[0], str) else ""
                more = [] if salt else more
            if more:
                named = block
                break
    return Content(tokens, event.block_size, lora, salt, named, event.kv_cache_spec_kind)


def _beside_adapter(extra: Any, lora: str) -> list[Any]:
    """What a block was hashed with besides its tokens and its adapter: salt, images, embeddings."""
    if extra is None:
        return []
    if not isinstance(extra, list):
        return [extra]
    return extra[1:] if lora and extra[:1] == [lora] else extra
