"""One node gives its DRAM to the next: what crosses the socket, and both sides of it.

    next one                              the node that runs
    Control "bequeath"  ───────────────►
                        ◄───────────────  Report: it drains
                                          grants nothing more, writes what is not on SSD yet,
                                          closes its stores; from here on it touches no slot
                        ◄───────────────  Will, for each keyspace: Share + memfd,
                                          Blocks ..., Fence + life pipe ..., then Sealed
    takes the lock      ◄╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌  ends

Messages are framed as in `messages.py`; a descriptor comes with the first byte of its message. What
is not whole up to `Sealed`, or not as it should be, counts for nothing: the next node then starts
with an empty DRAM, as it does when the one before it was killed. Blocks are believed when their
bytes were proven (`store/succession.py`), so nothing that is wrong here can make a wrong block.

`WILL_VERSION` is a promise about these messages; another one is not read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Annotated

import msgspec
from msgspec import Meta

from kvist.core.errors import NodeAwayError, NodeRefusedError
from kvist.core.keys import KEY_BYTES
from kvist.node import messages as m
from kvist.node.attachment import connect
from kvist.node.estates import Left, LifeFences
from kvist.node.keyspaces import Attach
from kvist.node.protocol import (
    MOST_BYTES,
    Frames,
    ProtocolError,
    decode,
    decode_reply,
    encode,
    join_keys,
    pack_slots,
    split_keys,
    unpack_slots,
)
from kvist.store.succession import Bequest, Estate, Legacy

_log = logging.getLogger(__name__)
WILL_VERSION = 1
BEQUEATH = "bequeath"
_CHUNK_BLOCKS = 4096
_MOST_KEYSPACES = 64
_MOST_FENCES = 1 << 12
_RECEIVE_BYTES = 256 << 10
_MOST_FDS = 64  # in one call of `recvmsg`
_NO_PARENT = bytes(KEY_BYTES)
_SUM_BYTES = 8
_HEAD_BYTES = 4  # a message's length, before its body
_DIRTY, _REFUSED, _LENT, _PINNED = 1, 2, 4, 8
_Bytes = Annotated[bytes, Meta(max_length=MOST_BYTES)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """As in `messages.py`."""


class Will(_Message, frozen=True, tag=80):
    """How many keyspaces there are."""

    version: m.Number
    keyspaces: Annotated[int, Meta(ge=0, le=_MOST_KEYSPACES)]


class Share(_Message, frozen=True, tag=81):
    """A keyspace's arena, whose memfd comes along, and how much is said of it."""

    fingerprint: Annotated[bytes, Meta(min_length=1, max_length=64)]
    layout: m.Text
    block_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    slot_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    size_bytes: Annotated[int, Meta(ge=1, le=1 << 50)]
    touched_slots: m.Number
    blocks: m.Number
    fences: Annotated[int, Meta(ge=0, le=_MOST_FENCES)]


class Blocks(_Message, frozen=True, tag=82):
    """Blocks, coldest first; checksums as little-endian u64, one byte of flags each."""

    keys: m.Keys
    parents: m.Keys
    slots: m.Slots
    checksums: _Bytes
    flags: m.Codes
    tenants: m.Names


class Fence(_Message, frozen=True, tag=83):
    """Slots that somebody may touch until the pipe ends that comes along."""

    slots: _Bytes


class Sealed(_Message, frozen=True, tag=84):
    """The end; `digest` (BLAKE2b) is that of the bodies of all messages before, in order."""

    digest: Annotated[bytes, Meta(max_length=64)]


_Part = Will | Share | Blocks | Fence | Sealed
_parts: msgspec.msgpack.Decoder[_Part] = msgspec.msgpack.Decoder(_Part)


# -- the node that runs -------------------------------------------------------------------------


def bequeath(heir: socket.socket, left: Sequence[Left], *, deadline_s: float) -> None:
    """Sends everything to the next node; the caller touches none of it any more.

    Raises:
        OSError: the next node is gone, or took too long.
    """
    until = time.monotonic() + deadline_s
    digest = hashlib.blake2b()

    def send(message: msgspec.Struct, fd: int | None = None) -> None:
        data = encode(message)
        digest.update(data[_HEAD_BYTES:])
        heir.settimeout(max(0.001, until - time.monotonic()))
        if fd is not None:
            sent = socket.send_fds(heir, [data[:1]], [fd])
            data = data[sent:]
        heir.sendall(data)

    send(Will(WILL_VERSION, len(left)))
    for one in left:
        attach, legacy, estate = one.attach, one.legacy, one.legacy.estate
        pipes = legacy.fences.pipes()
        share = Share(
            attach.fingerprint,
            attach.layout,
            attach.block_bytes,
            legacy.slot_bytes,
            legacy.size_bytes,
            estate.touched_slots,
            len(estate.blocks),
            len(pipes),
        )
        send(share, legacy.fd)
        for start in range(0, len(estate.blocks), _CHUNK_BLOCKS):
            send(_packed(estate.blocks[start : start + _CHUNK_BLOCKS]))
        for fd, slots in pipes.items():
            send(Fence(pack_slots(sorted(slots))), fd)
    send(Sealed(digest.digest()))


def _packed(blocks: Sequence[Bequest]) -> Blocks:
    return Blocks(
        join_keys([b.key for b in blocks]),
        join_keys([b.parent or _NO_PARENT for b in blocks]),
        pack_slots([b.slot for b in blocks]),
        struct.pack(f"<{len(blocks)}Q", *(b.checksum for b in blocks)),
        bytes(
            _DIRTY * b.dirty | _REFUSED * b.refused | _LENT * b.lent | _PINNED * b.pinned
            for b in blocks
        ),
        tuple(b.tenant for b in blocks),
    )


# -- the next one -------------------------------------------------------------------------------


def inherit(path: str | os.PathLike[str], *, deadline_s: float) -> list[Left]:
    """Ends the node that runs and takes what it leaves; nothing, if anything goes wrong.

    Raises:
        NodeAwayError: no node listens there.
        NodeRefusedError: it does not know how to do that: it is of an older Kvist.
    """
    with connect(os.fspath(path), deadline_s) as link:
        ask = m.Control(m.MAGIC, m.OLDEST_PROTOCOL, m.NEWEST_PROTOCOL, BEQUEATH)
        try:
            link.sendall(encode(ask))
        except OSError as error:
            raise NodeAwayError(f"{path}: {error}") from error
        return receive(link, deadline_s=deadline_s)


def receive(link: socket.socket, *, deadline_s: float) -> list[Left]:
    """What a node leaves that was asked on `link`; nothing, if anything is wrong with it.

    Raises:
        NodeAwayError: it did not answer.
        NodeRefusedError: it does not know how to do that.
    """
    with closing(_Reader(link, time.monotonic() + deadline_s)) as reader:
        try:
            answer = decode_reply(reader.body())
        except (OSError, ProtocolError) as error:
            raise NodeAwayError(f"the node did not answer: {error}") from error
        if not isinstance(answer, m.Report):
            raise NodeRefusedError(getattr(answer, "reason", "it does not say what it leaves"))
        try:
            return _received(reader)
        except (OSError, ProtocolError) as error:
            _log.warning("DRAM starts empty: what the former node left is not whole: %s", error)
            return []


class _Reader:
    """Messages and the descriptors that come with them. Closes those that nobody took."""

    def __init__(self, link: socket.socket, until: float) -> None:
        self._link, self._until = link, until
        self._frames = Frames(MOST_BYTES)
        self._bodies: deque[bytes] = deque()
        self._fds: deque[int] = deque()

    def body(self) -> bytes:
        """The next message.

        Raises:
            OSError: it does not come.
            ProtocolError: the other side has hung up, or talks nonsense.
        """
        while not self._bodies:
            left_s = self._until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("it took too long")
            self._link.settimeout(left_s)
            data, fds, flags, _ = socket.recv_fds(
                self._link, _RECEIVE_BYTES, _MOST_FDS, socket.MSG_CMSG_CLOEXEC
            )
            self._fds += fds
            if flags & socket.MSG_CTRUNC:
                raise ProtocolError("descriptors were lost")
            if not data:
                raise ProtocolError("the former node hung up")
            try:
                self._bodies.extend(self._frames.feed(data))
            except ProtocolError:
                if not self._bodies:  # what came whole before counts; the next call fails
                    raise
        return self._bodies.popleft()

    def descriptor(self) -> int:
        """The one that came with the last message; the caller's from here on.

        Raises:
            ProtocolError: none did.
        """
        if not self._fds:
            raise ProtocolError("a descriptor is missing")
        return self._fds.popleft()

    def close(self) -> None:
        """Lets go of what was not taken."""
        while self._fds:
            os.close(self._fds.popleft())


def _received(reader: _Reader) -> list[Left]:
    """Everything up to the seal.

    Raises:
        OSError: it did not come in time.
        ProtocolError: it is not whole, or contradicts itself.
    """
    found: list[Left] = []
    digest = hashlib.blake2b()

    def part() -> _Part:
        body = reader.body()
        heard = decode(_parts, body)
        if not isinstance(heard, Sealed):
            digest.update(body)
        return heard

    try:
        will = part()
        if not isinstance(will, Will) or will.version != WILL_VERSION:
            raise ProtocolError(f"not a will of version {WILL_VERSION}")
        for _ in range(will.keyspaces):
            share = part()
            if not isinstance(share, Share):
                raise ProtocolError("a share is missing")
            found.append(_share(share, reader, part))
        seal = part()
        if not isinstance(seal, Sealed) or seal.digest != digest.digest():
            raise ProtocolError("it is not sealed")
    except (OSError, ProtocolError):
        for left in found:
            left.close()
        raise
    return found


def _share(share: Share, reader: _Reader, part: Callable[[], _Part]) -> Left:
    """One keyspace.

    Raises:
        OSError: it did not come in time.
        ProtocolError: it is not whole, or contradicts itself.
    """
    if share.blocks > share.size_bytes // share.slot_bytes:
        raise ProtocolError("there are more blocks than slots")
    fd = reader.descriptor()
    pipes: dict[int, frozenset[int]] = {}
    try:
        blocks: list[Bequest] = []
        while len(blocks) < share.blocks:
            heard = part()
            if not isinstance(heard, Blocks) or not heard.keys:
                raise ProtocolError("blocks are missing")
            blocks += _unpacked(heard)
        for _ in range(share.fences):
            fence = part()
            if not isinstance(fence, Fence):
                raise ProtocolError("a fence is missing")
            pipes[reader.descriptor()] = frozenset(unpack_slots(fence.slots))
        fenced = frozenset(slot for slots in pipes.values() for slot in slots)
        _check(share, os.fstat(fd).st_size, blocks, fenced)
    except (OSError, ProtocolError):
        for held in (fd, *pipes):
            os.close(held)
        raise
    estate = Estate(share.touched_slots, blocks, fenced)
    legacy = Legacy(fd, share.size_bytes, share.slot_bytes, estate, LifeFences(pipes))
    return Left(Attach(share.fingerprint, share.layout, share.block_bytes), legacy)


def _unpacked(packed: Blocks) -> Iterator[Bequest]:
    keys, parents, slots = (
        split_keys(packed.keys),
        split_keys(packed.parents),
        unpack_slots(packed.slots),
    )
    sizes = {len(keys), len(parents), len(slots), len(packed.flags), len(packed.tenants)}
    if sizes != {len(keys)} or len(packed.checksums) != _SUM_BYTES * len(keys):
        raise ProtocolError("blocks come with other numbers of slots, checksums and tenants")
    sums = struct.unpack(f"<{len(keys)}Q", packed.checksums)
    parts = zip(keys, parents, slots, sums, packed.tenants, packed.flags, strict=True)
    for key, parent, slot, checksum, tenant, flags in parts:
        yield Bequest(
            key,
            None if parent == _NO_PARENT else parent,
            slot,
            checksum,
            tenant=tenant,
            dirty=bool(flags & _DIRTY),
            refused=bool(flags & _REFUSED),
            lent=bool(flags & _LENT),
            pinned=bool(flags & _PINNED),
        )


def _check(
    share: Share, size_bytes: int, blocks: Sequence[Bequest], fenced: frozenset[int]
) -> None:
    """Raises `ProtocolError` for what cannot be so."""
    slots = [block.slot for block in blocks]
    capacity = share.size_bytes // share.slot_bytes
    if size_bytes < share.size_bytes or share.block_bytes > share.slot_bytes:
        raise ProtocolError("the memory is smaller than it should be")
    if len(blocks) != share.blocks or len(set(slots)) != len(slots):
        raise ProtocolError("a slot has two blocks")
    if len({block.key for block in blocks}) != len(blocks):
        raise ProtocolError("a block is in two slots")
    if max([share.touched_slots - 1, *slots, *fenced], default=-1) >= capacity:
        raise ProtocolError("a slot is beyond the memory")
