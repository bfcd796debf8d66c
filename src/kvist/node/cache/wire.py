"""Decoding of the messages of `messages.py` on the socket; `protocol.encode` encodes them."""

from __future__ import annotations

import msgspec

from kvist.node.cache.messages import Reply, Request
from kvist.node.protocol import decode

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decode_request(body: bytes) -> Request:
    """What a person asks.

    Raises:
        ProtocolError: it is no request.
    """
    return decode(_requests, body)


def decode_reply(body: bytes) -> Reply:
    """What a node answers.

    Raises:
        ProtocolError: it is no reply.
    """
    return decode(_replies, body)
