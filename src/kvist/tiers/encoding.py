"""Payloads on their way down, encoded as a tier is told to, and the frames around them."""

from __future__ import annotations

from dataclasses import replace

from kvist.codec.frame import RAW_CODEC, FrameHeader, FrameKind
from kvist.codec.registry import CodecRegistry
from kvist.core.keys import Key
from kvist.native import checksum
from kvist.tiers.protocol import Payload


def encoded(payload: Payload, codecs: CodecRegistry) -> Payload:
    """`payload` as `codecs` write it; itself if it is encoded already or best stored raw.

    Raises:
        FormatError: the block is not of the layout that the codecs are for.
    """
    if codecs.writer is None or payload.codec != RAW_CODEC:
        return payload
    block = payload.data.cast("B")
    data = codecs.writer.encode(block, key=payload.key, tenant=payload.tenant)
    if data is None:
        return payload
    return replace(
        payload,
        data=memoryview(data),
        codec=codecs.writer.name,
        raw_bytes=len(block),
        checksum=None,
    )


def block_header(payload: Payload, keyspace: bytes) -> FrameHeader:
    """The frame's header for a payload; its sequence is given later."""
    data = payload.data.cast("B")
    return FrameHeader(
        kind=FrameKind.BLOCK,
        sequence=0,
        keyspace=keyspace,
        key=payload.key,
        parent=payload.parent,
        raw_bytes=payload.decoded_bytes,
        stored_bytes=len(data),
        payload_checksum=checksum(data) if payload.checksum is None else payload.checksum,
        codec=payload.codec,
    )


def tombstone_header(key: Key, keyspace: bytes) -> FrameHeader:
    """The header of the frame that says that `key` was removed; its sequence is given later."""
    return FrameHeader(
        kind=FrameKind.TOMBSTONE,
        sequence=0,
        keyspace=keyspace,
        key=key,
        parent=None,
        raw_bytes=0,
        stored_bytes=0,
        payload_checksum=checksum(b""),
    )
