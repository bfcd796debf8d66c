"""A block as an object: its name, its frame, and the proof of what came back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvist.adapters.protocol import NewObject, Wanted
from kvist.codec.frame import (
    PAGE_BYTES,
    RAW_CODEC,
    FrameHeader,
    FrameKind,
    frame_bytes,
    padded_bytes,
)
from kvist.codec.registry import CodecRegistry
from kvist.core.errors import FormatError, VersionError
from kvist.core.keys import KEY_BYTES, Key
from kvist.native import checksum
from kvist.tiers.encoding import block_header
from kvist.tiers.protocol import Payload

_ZEROS = memoryview(bytes(PAGE_BYTES))
_MOST_ENCODED_RATIO = 2  # no codec makes a block larger than this


class MissCause(Enum):
    """Why a read was no hit."""

    ABSENT = "absent"
    SIZE = "size"  # of a block of another size than was asked for; it stays
    VERSION = "version"  # written by a newer Kvist; it stays
    CODEC = "codec"  # encoded by a codec that this Kvist does not know; it stays
    DAMAGED = "damaged"  # cut short, changed, or another block's: it is removed

    @property
    def is_damage(self) -> bool:
        """Whether the object is of no use to anybody."""
        return self is MissCause.DAMAGED


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a keyspace's objects: `FINGERPRINT/KEY`, both in hex."""

    keyspace: bytes

    @property
    def prefix(self) -> str:
        """What every name begins with."""
        return self.keyspace.hex() + "/"

    def name(self, key: Key) -> str:
        """The name of the object that holds block `key`."""
        return self.prefix + key.hex()

    def key(self, name: str) -> Key | None:
        """The block that an object holds; `None` for a name that is none of ours."""
        head, _, text = name.rpartition("/")
        if head != self.keyspace.hex() or len(text) != 2 * KEY_BYTES:
            return None
        try:
            return bytes.fromhex(text)
        except ValueError:
            return None


def framed(payload: Payload, names: Names) -> NewObject:
    """The object of a block: header page, payload, zeros up to a whole page."""
    data = payload.data.cast("B")
    header = block_header(payload, names.keyspace)
    padding = _ZEROS[: padded_bytes(len(data)) - len(data)]
    return NewObject(names.name(payload.key), (memoryview(header.pack()), data, padding))


class Arrival:
    """The buffers of one block that is being read, and the proof of it."""

    def __init__(
        self,
        key: Key,
        out: memoryview,
        names: Names,
        codecs: CodecRegistry,
        *,
        size_bytes: int = 0,
    ) -> None:
        """A raw payload goes straight into `out`, which has the block's exact raw size.

        `size_bytes` is what the object is believed to have, 0 where that is not known: one that is
        not of a raw block's size is read into a buffer of its own.
        """
        self._key = key
        self._out = out.cast("B")
        self._keyspace = names.keyspace
        self._codecs = codecs
        self._header = memoryview(bytearray(PAGE_BYTES))
        padding = padded_bytes(len(self._out)) - len(self._out)
        self._padding = memoryview(bytearray(padding))
        self.wanted = Wanted(names.name(key), (self._header, self._out, self._padding))
        self._whole: memoryview | None = None
        if size_bytes not in (0, self.wanted.size_bytes):
            self.expect(size_bytes)

    def expect(self, size_bytes: int) -> MissCause | None:
        """From now on wants a whole object of this size, unless that can be no block's."""
        whole = self._room(size_bytes)
        if isinstance(whole, MissCause):
            return whole
        self._whole = whole
        self.wanted = Wanted(self.wanted.name, (whole,))
        return None

    def _room(self, size_bytes: int) -> memoryview | MissCause:
        """A buffer for an object of another size than the raw block's: an encoded one, perhaps."""
        if size_bytes < PAGE_BYTES or size_bytes % PAGE_BYTES:
            return MissCause.DAMAGED
        if size_bytes > frame_bytes(_MOST_ENCODED_RATIO * len(self._out)):
            return MissCause.SIZE
        return memoryview(bytearray(size_bytes))

    def prove(self) -> MissCause | None:
        """Whether `wanted` brought the block; `None` is a hit, and then `out` holds it."""
        if self._whole is not None:
            return self._prove_whole(self._whole)
        header = read_header(self._header, self._key, self._keyspace)
        if isinstance(header, MissCause):
            return header
        if header.total_bytes != self.wanted.size_bytes:
            return MissCause.DAMAGED
        if header.codec == RAW_CODEC and header.stored_bytes == header.raw_bytes:
            if header.raw_bytes != len(self._out):
                return MissCause.SIZE
            if checksum(self._out) != header.payload_checksum:
                return MissCause.DAMAGED
            return None if self._codecs.takes_raw else MissCause.CODEC
        stored = bytearray(self._out) + self._padding
        return self._decode(header, memoryview(stored)[: header.stored_bytes])

    def _prove_whole(self, whole: memoryview) -> MissCause | None:
        header = read_header(whole[:PAGE_BYTES], self._key, self._keyspace)
        if isinstance(header, MissCause):
            return header
        if header.total_bytes != len(whole):
            return MissCause.DAMAGED
        return self._decode(header, whole[PAGE_BYTES : PAGE_BYTES + header.stored_bytes])

    def _decode(self, header: FrameHeader, stored: memoryview) -> MissCause | None:
        if checksum(stored) != header.payload_checksum:
            return MissCause.DAMAGED
        if header.raw_bytes != len(self._out):
            return MissCause.SIZE
        if header.codec == RAW_CODEC:
            if len(stored) != len(self._out):
                return MissCause.DAMAGED  # says two sizes of itself
            self._out[:] = stored
            return None if self._codecs.takes_raw else MissCause.CODEC
        chain = self._codecs.find(header.codec)
        if chain is None:
            return MissCause.CODEC
        try:
            chain.decode(stored, self._out, key=self._key)
        except VersionError:
            return MissCause.VERSION
        except FormatError:
            return MissCause.CODEC
        return None


def read_header(page: memoryview, key: Key, keyspace: bytes) -> FrameHeader | MissCause:
    """The header of block `key` of `keyspace`, or what is wrong with it."""
    try:
        header = FrameHeader.unpack(page)
    except VersionError:
        return MissCause.VERSION
    except FormatError:
        return MissCause.DAMAGED
    expected = (FrameKind.BLOCK, keyspace, key)
    found = (header.kind, header.keyspace, header.key)
    return header if found == expected else MissCause.DAMAGED


def is_damaged(whole: memoryview, key: Key, keyspace: bytes) -> bool:
    """Whether an object is no block at all, whatever its size or codec."""
    if len(whole) < PAGE_BYTES:
        return True
    header = read_header(whole[:PAGE_BYTES], key, keyspace)
    if isinstance(header, MissCause):
        return header.is_damage
    if header.total_bytes != len(whole):
        return True
    stored = whole[PAGE_BYTES : PAGE_BYTES + header.stored_bytes]
    return checksum(stored) != header.payload_checksum
