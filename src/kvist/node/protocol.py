"""The bytes of the messages of `messages.py`: encoding, checking, cutting a stream."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from kvist.core.errors import FormatError
from kvist.core.keys import KEY_BYTES, Key
from kvist.node.messages import (
    MAGIC,
    NEWEST_PROTOCOL,
    OLDEST_PROTOCOL,
    First,
    Reply,
    Request,
)

MOST_FIRST_BYTES = 8 << 10  # of a message before the handshake is over
MOST_BYTES = 6 << 20
_HEAD = struct.Struct("<I")
T = TypeVar("T")


class ProtocolError(FormatError):
    """Bytes that are no message, or a message that is not allowed here."""


_encoder = msgspec.msgpack.Encoder()
_first: msgspec.msgpack.Decoder[First] = msgspec.msgpack.Decoder(First)
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: msgspec.Struct) -> bytes:
    """A message with its length before it.

    Raises:
        ProtocolError: it is longer than a message may be.
    """
    body = _encoder.encode(message)
    if len(body) > MOST_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes; at most {MOST_BYTES} may be sent")
    return _HEAD.pack(len(body)) + body


def decode_first(body: bytes) -> First:
    """A `Hello` or a `Control`.

    Raises:
        ProtocolError: it is neither.
    """
    first = decode(_first, body)
    if first.magic != MAGIC:
        raise ProtocolError(f"the first word is {first.magic!r}, not {MAGIC!r}")
    return first


def decode_request(body: bytes) -> Request:
    """What an engine says after the handshake.

    Raises:
        ProtocolError: it is no request.
    """
    return decode(_requests, body)


def decode_reply(body: bytes) -> Reply:
    """What a node says.

    Raises:
        ProtocolError: it is no reply.
    """
    return decode(_replies, body)


def decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    """What a decoder makes of a message's body.

    Raises:
        ProtocolError: nothing.
    """
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise ProtocolError(f"not a message: {error}") from error


def choose_protocol(oldest: int, newest: int, *, ours: tuple[int, int] | None = None) -> int | None:
    """The newest protocol that both sides speak, if there is one; `ours` are oldest and newest."""
    our_oldest, our_newest = ours or (OLDEST_PROTOCOL, NEWEST_PROTOCOL)
    both = min(newest, our_newest)
    return both if both >= max(oldest, our_oldest) else None


class Frames:
    """Cuts a stream into messages. Holds less than one message, never more than its limit."""

    def __init__(self, most_bytes: int = MOST_FIRST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._buffer = bytearray()

    @property
    def held_bytes(self) -> int:
        """Bytes of a message that is not whole yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies of the messages that are whole now.

        Raises:
            ProtocolError: a message claims to be longer than the limit.
        """
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._buffer)
            if size > self.most_bytes:
                raise ProtocolError(
                    f"a message of {size} bytes; at most {self.most_bytes} may come"
                )
            end = _HEAD.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            yield body


def join_keys(keys: Sequence[Key]) -> bytes:
    """Keys as one string."""
    return b"".join(keys)


def split_keys(joined: bytes) -> list[Key]:
    """The keys of a string.

    Raises:
        ProtocolError: it is not a number of whole keys.
    """
    if len(joined) % KEY_BYTES:
        raise ProtocolError(f"{len(joined)} bytes are not a number of whole keys")
    return [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]


def pack_slots(slots: Sequence[int]) -> bytes:
    """Slot numbers as little-endian u32."""
    return struct.pack(f"<{len(slots)}I", *slots)


def unpack_slots(packed: bytes) -> tuple[int, ...]:
    """Slot numbers.

    Raises:
        ProtocolError: it is not a number of whole u32.
    """
    if len(packed) % 4:
        raise ProtocolError(f"{len(packed)} bytes are not a number of slots")
    return struct.unpack(f"<{len(packed) // 4}I", packed)
