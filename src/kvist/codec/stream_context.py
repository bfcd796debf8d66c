"""A context's blocks as the chunks that `stream_link` sends, each encoded at several levels.

A chunk at a level is u32 blocks, then for each its payload's u32 length, then the payloads.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvist.codec.payload import BlockCodec
from kvist.codec.stream_link import MAX_LEVELS
from kvist.core.errors import ConfigError, FormatError

_COUNT = struct.Struct("<I")


class EncodedContext:
    """A `ContextSource` of blocks that are encoded at once, at every level. Immutable.

    It holds the payloads of all levels: with `cachegen` 1, 3 and 5 about as much as the context.
    """

    def __init__(
        self,
        blocks: Sequence[memoryview],
        codecs: Sequence[BlockCodec],
        *,
        blocks_a_chunk: int,
        block_tokens: int,
    ) -> None:
        """Encodes `blocks`, `blocks_a_chunk` in each chunk.

        Args:
            codecs: the levels, the least lossy first.

        Raises:
            ConfigError: no levels or more than a link takes, or empty chunks.
            FormatError: a block is not of the codecs' layout.
        """
        if not 0 < len(codecs) <= MAX_LEVELS or blocks_a_chunk < 1:
            raise ConfigError(f"{len(codecs)} levels, {blocks_a_chunk} blocks a chunk")
        parts = [blocks[at : at + blocks_a_chunk] for at in range(0, len(blocks), blocks_a_chunk)]
        self.tokens = [len(part) * block_tokens for part in parts]
        self.levels = len(codecs)
        self._payloads = [
            [_join([codec.encode(block) for block in part]) for codec in codecs] for part in parts
        ]

    def payload(self, chunk: int, level: int) -> bytes:
        """See `ContextSource`."""
        return self._payloads[chunk][level]


def decode_chunk(payload: bytes, codec: BlockCodec, places: Sequence[memoryview]) -> None:
    """Decodes a chunk's blocks into `places`; on an error their bytes are undefined.

    Raises:
        FormatError: the chunk is not one of so many blocks of the codec.
    """
    view = memoryview(payload)
    count = len(places)
    if len(view) < 4 * (count + 1) or _COUNT.unpack_from(view)[0] != count:
        raise FormatError(f"a chunk of {len(view)} bytes that is not of {count} blocks")
    sizes = struct.unpack_from(f"<{count}I", view, 4)
    at = 4 * (count + 1)
    if at + sum(sizes) != len(view):
        raise FormatError(f"a chunk of {len(view)} bytes for payloads of {sum(sizes)}")
    for size, place in zip(sizes, places, strict=True):
        codec.decode(view[at : at + size], place)
        at += size


def _join(payloads: Sequence[bytes]) -> bytes:
    sizes = struct.pack(f"<{len(payloads) + 1}I", len(payloads), *map(len, payloads))
    return b"".join([sizes, *payloads])
