"""Chains of codecs: what a frame's codec field names, and how a block goes through it and back.

A chain is written as words joined by `+`: a codec of blocks (or `raw`, which may be left out before
`aead`), then perhaps `aead`. So there are `raw`, `lossless`, `int8`, `lossless+aead`, `aead` ….
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvist.codec.aead import AEAD, Sealer
from kvist.codec.cachegen.codec import Cachegen
from kvist.codec.cachegen.levels import BY_NAME, level_named
from kvist.codec.cachegen.table import ProfileTable
from kvist.codec.frame import RAW_CODEC, Buffer
from kvist.codec.lossless import Lossless
from kvist.codec.payload import BlockCodec
from kvist.codec.quantised import Quantised
from kvist.core.errors import ConfigError, FormatError
from kvist.core.keys import Key
from kvist.core.layout import BlockLayout

_PATH = "$.store.ssd.codec"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecKind:
    """A codec of blocks before it is bound to a layout.

    `exact`: every bit comes back. `summary` is what the documentation says of it.
    """

    bind: Callable[[BlockLayout], BlockCodec]
    exact: bool
    summary: str


def _quantised(word: str, summary: str) -> CodecKind:
    return CodecKind(bind=lambda layout: Quantised(word, layout), exact=False, summary=summary)


# Every codec of blocks that needs nothing but a layout, by its word.
CODECS: Mapping[str, CodecKind] = MappingProxyType(
    {
        "lossless": CodecKind(
            bind=Lossless, exact=True, summary="byte planes, entropy-coded; every bit comes back"
        ),
        "int8": _quantised("int8", "8 bits a value, scales by group"),
        "fp8": _quantised("fp8", "8 bits a value (e4m3), scales by group"),
        "int4": _quantised("int4", "4 bits a value, scale and zero point by group"),
    }
)

# Those that need a model's table besides (`kvist codec profile`). None is exact.
TABLED = tuple(BY_NAME)
_TABLE_PATH = "$.store.ssd.table"


def bind_codec(word: str, layout: BlockLayout, table: ProfileTable | None = None) -> BlockCodec:
    """The codec of blocks that `word` means, bound to a layout.

    Raises:
        ConfigError: it does not take the layout, or needs a table that there is not.
    """
    if word in CODECS:
        return CODECS[word].bind(layout)
    level = level_named(word)
    if table is None:
        raise ConfigError(
            f"{word} needs a table of the model",
            path=_TABLE_PATH,
            remedy="make one: kvist codec profile MODEL --out FILE",
        )
    return Cachegen(table, level, layout)


@dataclass(frozen=True, slots=True)
class ChainSpec:
    """What a chain's name says: the word of its codec of blocks, and whether it is sealed."""

    word: str
    sealed: bool

    @property
    def name(self) -> str:
        """The one way of writing it, as frames do."""
        if not self.sealed:
            return self.word
        return AEAD if self.word == RAW_CODEC else f"{self.word}+{AEAD}"

    @property
    def exact(self) -> bool:
        """Whether every bit comes back."""
        return self.word == RAW_CODEC or (self.word in CODECS and CODECS[self.word].exact)


def parse_chain(text: str) -> ChainSpec:
    """Reads a chain's name.

    Raises:
        ConfigError: it names a codec that there is not, or in an order that there is not.
    """
    words = text.split("+")
    sealed = words[-1] == AEAD
    rest = words[:-1] if sealed else words
    if not rest:
        rest = [RAW_CODEC]
    if len(rest) != 1 or rest[0] not in (RAW_CODEC, *CODECS, *TABLED):
        known = ", ".join((RAW_CODEC, *CODECS, *TABLED))
        raise ConfigError(
            f"no codec is named {text!r}",
            path=_PATH,
            remedy=f"use {known}, or one of them + {AEAD}",
        )
    return ChainSpec(rest[0], sealed)


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain bound to a layout. Thread-safe."""

    name: str
    codec: BlockCodec | None
    sealer: Sealer | None = None
    exact: bool = True

    def encode(self, block: memoryview, *, key: Key, tenant: str = "") -> Buffer | None:
        """The payload of `block`; `None` if it is best stored raw: no smaller, and not sealed.

        Raises:
            FormatError: `block` is not of the size that the codec was bound to.
        """
        payload: Buffer = block if self.codec is None else self.codec.encode(block)
        if self.sealer is not None:
            return self.sealer.seal(payload, context=self._context(key), tenant=tenant)
        return payload if len(payload) < block.nbytes else None

    def decode(self, stored: memoryview, out: memoryview, *, key: Key) -> None:
        """Fills `out`, the raw bytes of block `key`. On an error `out` is undefined.

        Raises:
            FormatError: `stored` is not what `encode` makes of a block `key` of `out`'s size.
        """
        if self.sealer is not None:
            stored = memoryview(self.sealer.open(stored, context=self._context(key)))
        if self.codec is not None:
            self.codec.decode(stored, out)
        elif len(stored) != len(out):
            raise FormatError(f"a block of {len(stored)} bytes, not {len(out)}")
        else:
            out[:] = stored

    def _context(self, key: Key) -> bytes:
        return self.name.encode() + b"\0" + key
