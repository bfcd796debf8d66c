"""The codec that gives back every bit: planes of bytes, each with an entropy coder of its own.

What a KV cache repeats is its exponents: within a layer's K or V they take few values. Each value
is turned by a bit so that the exponent fills its top byte; each byte position of each (layer, K or
V) is then coded by rANS with a table of its own, or kept as it is where that spares nothing
(`native/cpp/planes.hpp` draws what is made of them). The payload's head names the layout; its body
begins with the XXH3-64 of the block, little-endian, which decoding proves: what comes back is the
block, or nothing does.
"""

from __future__ import annotations

from kvist.codec.payload import NO_TABLE, CodecId, PayloadHead, layout_tag, open_payload
from kvist.core.errors import ChecksumError, FormatError
from kvist.core.layout import BlockLayout
from kvist.native import checksum, decode_planes, encode_planes

LOSSLESS = "lossless"
_CHECKSUM_BYTES = 8


class Lossless:
    """`BlockCodec` for any layout and dtype; whatever the bits are, they come back."""

    name = LOSSLESS

    def __init__(self, layout: BlockLayout) -> None:
        self._raw_bytes = layout.block_bytes
        self._groups = layout.layers * layout.kinds
        self._width = layout.itemsize
        self._tag = layout_tag(layout)

    def encode(self, block: memoryview) -> bytes:
        """See `BlockCodec`: at most `block`'s size and a few bytes for each layer.

        Raises:
            FormatError: `block` is not of the layout's size.
        """
        if block.nbytes != self._raw_bytes:
            raise FormatError(f"a block has {self._raw_bytes} bytes, not {block.nbytes}")
        digest = checksum(block).to_bytes(_CHECKSUM_BYTES, "little")
        planes = encode_planes(block, self._groups, self._width)
        head = PayloadHead(
            CodecId.LOSSLESS,
            raw_bytes=self._raw_bytes,
            body_bytes=_CHECKSUM_BYTES + len(planes),
            layout=self._tag,
        )
        return b"".join((head.pack(), digest, planes))

    def decode(self, stored: memoryview, out: memoryview) -> None:
        """See `Decoder`. On an error the bytes of `out` are undefined.

        Raises:
            FormatError: the payload is not what `encode` makes of such a block.
        """
        if out.nbytes != self._raw_bytes:
            raise FormatError(f"a block has {self._raw_bytes} bytes, not {out.nbytes}")
        _, body = open_payload(
            stored,
            codec=CodecId.LOSSLESS,
            raw_bytes=self._raw_bytes,
            layout=self._tag,
            level=0,
            table=NO_TABLE,
        )
        try:
            decode_planes(body[_CHECKSUM_BYTES:], out, self._groups, self._width)
        except ValueError as exc:
            raise FormatError(f"a lossless payload that cannot be decoded: {exc}") from exc
        if checksum(out) != int.from_bytes(body[:_CHECKSUM_BYTES], "little"):
            raise ChecksumError("a lossless payload that gives another block than was encoded")
