"""Which chains of codecs a tier reads, and which it writes."""

from __future__ import annotations

from collections.abc import Iterable

from kvist.codec.aead import MAX_SEALED_BYTES, Sealer
from kvist.codec.cachegen.table import ProfileTable
from kvist.codec.chain import CODECS, TABLED, Chain, ChainSpec, bind_codec, parse_chain
from kvist.codec.frame import RAW_CODEC
from kvist.codec.keyring import Keyring
from kvist.codec.payload import BlockCodec
from kvist.core.errors import ConfigError
from kvist.core.layout import BlockLayout


class CodecRegistry:
    """Chains by name. `raw` needs none. Immutable."""

    def __init__(self, chains: Iterable[Chain] = (), *, writer: Chain | None = None) -> None:
        """Takes what is known from now on; `writer` encodes what is written, `None` leaves it raw.

        Raises:
            ConfigError: a chain is named `raw`.
        """
        self._chains = {chain.name: chain for chain in (*chains, *([writer] if writer else []))}
        if RAW_CODEC in self._chains:
            raise ConfigError(f"the codec name {RAW_CODEC!r} is taken")
        self.writer = writer

    @property
    def takes_raw(self) -> bool:
        """Whether a block that went through no codec may be read: not where blocks are sealed."""
        return self.writer is None or self.writer.sealer is None

    @property
    def names(self) -> tuple[str, ...]:
        """What is read besides `raw`."""
        return tuple(self._chains)

    def find(self, codec: str) -> Chain | None:
        """The chain named `codec`; `None` if it is none that may be read here."""
        return self._chains.get(codec)


def open_codecs(
    text: str,
    layout: BlockLayout | None,
    keyring: Keyring | None = None,
    table: ProfileTable | None = None,
) -> CodecRegistry:
    """What a tier of blocks of `layout` writes as the chain `text`, and all that it reads.

    It reads whatever an earlier setting may have written, sealed with any key of the ring and, of
    `cachegen`, with this table. But where `text` is exact, lossy chains are unknown, their blocks
    misses: who asks for exact answers gets them whatever was written before. And where `text` is
    sealed, so are those that are not: else whoever can write to the medium need not seal.

    Raises:
        ConfigError: there is no such chain, it does not take the layout, keys or a package are
            missing, or a table is or is of another model.
    """
    spec = parse_chain(text)
    sealer = Sealer(keyring) if keyring is not None else None
    if spec.sealed and sealer is None:
        raise ConfigError(
            f"{text} needs keys", path="$.store.ssd.keys", remedy="name a file, or env:VARIABLE"
        )
    if layout is None and spec.word != RAW_CODEC:
        raise ConfigError(
            f"{text} needs to know the layout of blocks, which this store was not told",
            path="$.store.ssd.codec",
            remedy=f"use {RAW_CODEC}",
        )
    if spec.sealed and layout is not None and layout.block_bytes > MAX_SEALED_BYTES:
        raise ConfigError(
            f"blocks of {layout.block_bytes} bytes are too large to be sealed",
            path="$.block_tokens",
            remedy="make blocks of fewer tokens",
        )
    writer = None
    if spec.name != RAW_CODEC:
        writer = _chain(spec, _bound(spec.word, layout, table), sealer)
    return CodecRegistry(_readable(spec, layout, sealer, table), writer=writer)


def _readable(
    written: ChainSpec,
    layout: BlockLayout | None,
    sealer: Sealer | None,
    table: ProfileTable | None,
) -> Iterable[Chain]:
    for word in (RAW_CODEC, *CODECS, *TABLED):
        spec = ChainSpec(word, sealed=False)
        if written.exact and not spec.exact:
            continue
        try:
            codec = _bound(word, layout, table)
        except ConfigError:
            continue  # no block of this layout was ever written so
        if codec is not None and not written.sealed:
            yield _chain(spec, codec, sealer)
        if sealer is not None:
            yield _chain(ChainSpec(word, sealed=True), codec, sealer)


def _bound(word: str, layout: BlockLayout | None, table: ProfileTable | None) -> BlockCodec | None:
    if word == RAW_CODEC:
        return None
    if layout is None:
        raise ConfigError(f"{word} needs a layout")
    return bind_codec(word, layout, table)


def _chain(spec: ChainSpec, codec: BlockCodec | None, sealer: Sealer | None) -> Chain:
    return Chain(spec.name, codec, sealer if spec.sealed else None, exact=spec.exact)
