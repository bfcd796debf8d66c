"""The codecs that are measured, and two that show what the others are worth: none, and a cast."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvist.codec.cachegen.table import ProfileTable
from kvist.codec.chain import CODECS, TABLED, bind_codec
from kvist.codec.frame import RAW_CODEC
from kvist.codec.payload import BlockCodec
from kvist.core.errors import ConfigError
from kvist.core.layout import BlockLayout

CAST = "cast-fp8"


@dataclass(frozen=True, slots=True)
class Coded:
    """Blocks after a codec, what it stored, and the CPU seconds that it took over all of them."""

    blocks: tuple[bytes, ...]
    stored_bytes: int
    encode_s: float
    decode_s: float
    copy_s: float


class RawCodec:
    """Keeps a block as it is."""

    name = RAW_CODEC

    def encode(self, block: memoryview) -> bytes:
        """A copy."""
        return bytes(block)

    def decode(self, stored: memoryview, out: memoryview) -> None:
        """A copy."""
        out[:] = stored


class CastCodec:
    """Every value as float8 e4m3 without a scale, as engines keep an `fp8` KV cache by default."""

    name = CAST

    def encode(self, block: memoryview) -> bytes:
        """One byte a value; those too large for e4m3 become its largest."""
        import torch

        values = torch.frombuffer(block, dtype=torch.bfloat16).float().clamp(-448, 448)
        return bytes(values.to(torch.float8_e4m3fn).view(torch.uint8).numpy())

    def decode(self, stored: memoryview, out: memoryview) -> None:
        """Back to bfloat16."""
        import torch

        values = torch.frombuffer(bytearray(stored), dtype=torch.float8_e4m3fn)
        torch.frombuffer(out, dtype=torch.bfloat16).copy_(values)


def _known(layout: BlockLayout, table: ProfileTable | None) -> dict[str, Callable[[], BlockCodec]]:
    words = (*CODECS, *(TABLED if table is not None else ()))
    known: dict[str, Callable[[], BlockCodec]] = {RAW_CODEC: RawCodec, CAST: CastCodec}
    return known | {word: partial(bind_codec, word, layout, table) for word in words}


def codec_names(layout: BlockLayout, table: ProfileTable | None = None) -> tuple[str, ...]:
    """Every codec that can be measured on blocks of `layout`; `cachegen` with a table only."""
    return tuple(_known(layout, table))


def codecs(
    words: Sequence[str], layout: BlockLayout, table: ProfileTable | None = None
) -> list[BlockCodec]:
    """Codecs by name, each once.

    Raises:
        ConfigError: there is no codec of a name, or it needs a table, of this model.
    """
    known = _known(layout, table)
    for word in words:
        if word in TABLED and table is None:
            raise ConfigError(
                f"{word} needs a table of the model", path="--table", remedy="kvist codec profile"
            )
        if word not in known:
            raise ConfigError(
                f"there is no codec {word!r}", path="--codecs", remedy=f"take {', '.join(known)}"
            )
    return [known[word]() for word in dict.fromkeys(words)]


def through(codec: BlockCodec, blocks: Sequence[bytes]) -> Coded:
    """Encodes and decodes every block, and copies it as often.

    Times are CPU seconds of the process, so that a busy machine does not slow a codec, and a codec
    that takes two cores is not called faster.

    Raises:
        KvistError: the codec refuses a block or its own payload.
    """
    out = memoryview(bytearray(len(blocks[0])))
    decoded, stored_bytes, encode_s, decode_s, copy_s = [], 0, 0.0, 0.0, 0.0
    for block in blocks:
        raw = memoryview(bytearray(block))
        began_s = time.process_time()
        stored = codec.encode(raw)
        encoded_s = time.process_time()
        codec.decode(memoryview(stored), out)
        decoded_s = time.process_time()
        decoded.append(bytes(out))
        copying_s = time.process_time()
        out[:] = raw
        copied_s = time.process_time()
        encode_s += encoded_s - began_s
        decode_s += decoded_s - encoded_s
        copy_s += copied_s - copying_s
        stored_bytes += len(stored)
    return Coded(tuple(decoded), stored_bytes, encode_s, decode_s, copy_s)
