"""Which codecs a reader knows: the name in a frame's header → how its payload is decoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvist.codec.frame import RAW_CODEC
from kvist.core.errors import ConfigError


class Decoder(Protocol):
    """The reading half of a codec chain. Thread-safe."""

    def decode(self, stored: memoryview, out: memoryview) -> None:
        """Fills `out`, the block's raw bytes, from a payload whose checksum was proven.

        Raises:
            FormatError: the payload is not what the codec makes, or of another raw size.
        """
        ...


class CodecRegistry:
    """Decoders by name. `raw` needs none. Immutable."""

    def __init__(self, decoders: Mapping[str, Decoder] | None = None) -> None:
        """Takes what is known from now on.

        Raises:
            ConfigError: a decoder is named `raw`.
        """
        if decoders is not None and RAW_CODEC in decoders:
            raise ConfigError(f"the codec name {RAW_CODEC!r} is taken")
        self._decoders = dict(decoders or {})

    def find(self, codec: str) -> Decoder | None:
        """The decoder of `codec`; `None` if this Kvist knows no such codec."""
        return self._decoders.get(codec)
