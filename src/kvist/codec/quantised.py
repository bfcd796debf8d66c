"""The codecs `int8`, `fp8` and `int4`: few bits a value, a scale for each group of values.

K is grouped by channel (a channel of K that is large stays so from token to token), V and latents
by token; the formats stand in `native/cpp/quantise.hpp`. Decoding gives back each value x of a
group as x̂, for which this bound holds. m is the group's greatest magnitude, r its greatest less
its least value, u what rounding to the block's dtype costs (2⁻⁸ bfloat16, 2⁻¹¹ float16, 2⁻²⁴
float32):

    int8   |x̂ - x| ≤ 0.505 m / 127 + u |x̂|
    fp8    |x̂ - x| ≤ max(0.0631 |x|, 0.001 m / 448) + u |x̂|
    int4   |x̂ - x| ≤ 0.505 r / 15 + u |x̂|

and 2⁻²⁴ more for float16, 2⁻¹²⁵ for the others, where values are next to nothing. A group with a
value that is not finite, or so near the largest that a code could overflow, comes back exactly.

Source: KIVI, arXiv:2402.02750, for the grouping.
"""

from __future__ import annotations

from kvist.codec.payload import NO_TABLE, CodecId, PayloadHead, layout_tag, open_payload
from kvist.core.errors import ConfigError, FormatError
from kvist.core.layout import BlockLayout
from kvist.native import decode_quantised, encode_quantised
from kvist.native.quantshape import Number, QuantShape, Scheme

_NUMBERS = {
    "bfloat16": Number.BFLOAT16,
    "float16": Number.FLOAT16,
    "float32": Number.FLOAT32,
}
_SCHEMES = {
    "int8": (CodecId.INT8, Scheme.INT8, 64),
    "fp8": (CodecId.FP8, Scheme.FP8, 64),
    "int4": (CodecId.INT4, Scheme.INT4, 32),
}
QUANTISED = tuple(_SCHEMES)


class Quantised:
    """`BlockCodec` that gives back nearly the block. A payload's level is the length of a group."""

    def __init__(self, name: str, layout: BlockLayout) -> None:
        """Binds the codec `name`, one of `QUANTISED`, to a layout.

        Raises:
            ConfigError: there is no such codec, or the layout's values are fp8 already.
        """
        if name not in _SCHEMES:
            raise ConfigError(f"no codec is named {name!r}; known: {', '.join(_SCHEMES)}")
        if layout.dtype not in _NUMBERS:
            raise ConfigError(f"the codec {name} does not take {layout.dtype} values")
        self._name = name
        self._id, scheme, group = _SCHEMES[name]
        self._tag = layout_tag(layout)
        self._shape = QuantShape(
            layers=layout.layers,
            kinds=layout.kinds,
            heads=layout.kv_heads,
            tokens=layout.block_tokens,
            dim=layout.head_dim,
            number=_NUMBERS[layout.dtype],
            scheme=scheme,
            group=group,
        )

    @property
    def name(self) -> str:
        return self._name

    def encode(self, block: memoryview) -> bytes:
        """See `BlockCodec`.

        Raises:
            FormatError: `block` is not of the layout's size.
        """
        if block.nbytes != self._shape.block_bytes:
            raise FormatError(f"a block has {self._shape.block_bytes} bytes, not {block.nbytes}")
        body = encode_quantised(block, self._shape)
        head = PayloadHead(
            self._id,
            raw_bytes=block.nbytes,
            body_bytes=len(body),
            level=self._shape.group,
            layout=self._tag,
        )
        return head.pack() + body

    def decode(self, stored: memoryview, out: memoryview) -> None:
        """See `Decoder`. On an error the bytes of `out` are undefined.

        Raises:
            FormatError: the payload is not what `encode` makes of such a block.
        """
        if out.nbytes != self._shape.block_bytes:
            raise FormatError(f"a block has {self._shape.block_bytes} bytes, not {out.nbytes}")
        _, body = open_payload(
            stored,
            codec=self._id,
            raw_bytes=out.nbytes,
            layout=self._tag,
            level=self._shape.group,
            table=NO_TABLE,
        )
        try:
            decode_quantised(body, out, self._shape)
        except ValueError as exc:
            raise FormatError(f"an {self._name} payload that cannot be decoded: {exc}") from exc
