"""`Agent` within one host and user: reads another process's memfd. The reference, and for tests."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from kvist.core.errors import TierError
from kvist.node.peers.carrying.words import Piece


class _Contact(msgspec.Struct, frozen=True, array_like=True):
    pid: int
    fd: int
    address: int
    size_bytes: int


class _Done:
    """A transfer that was over when it began."""

    def done(self) -> bool:
        """As of `Transfer`."""
        return True

    def release(self) -> None:
        """As of `Transfer`."""


class MemoryAgent:
    """See `agents.Agent`."""

    def __init__(self, memory: memoryview, fd: int, address: int) -> None:
        """`memory` is mapped from `fd` at `address`."""
        self._memory = memory
        self._own = _Contact(os.getpid(), fd, address, memory.nbytes)
        self._known: dict[str, tuple[int, _Contact]] = {}

    def contact(self) -> bytes:
        """As of `Agent`."""
        return msgspec.msgpack.encode(self._own)

    def meet(self, contact: bytes) -> str:
        """As of `Agent`."""
        try:
            other = msgspec.msgpack.decode(contact, type=_Contact)
            fd = os.open(f"/proc/{other.pid}/fd/{other.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:  # msgspec's own errors are ValueErrors
            raise TierError(f"no agent of this host: {error}") from error
        name = f"{other.pid}/{other.fd}"
        self.leave(name)
        self._known[name] = fd, other
        return name

    def leave(self, name: str) -> None:
        """As of `Agent`."""
        fd, _ = self._known.pop(name, (-1, None))
        if fd >= 0:
            os.close(fd)

    def fetch(self, name: str, pieces: Sequence[Piece]) -> _Done:
        """As of `Agent`."""
        if name not in self._known:
            raise TierError(f"agent {name} is not known")
        fd, other = self._known[name]
        for piece in pieces:
            at = piece.remote - other.address
            if at < 0 or at + piece.size_bytes > other.size_bytes:
                raise TierError("that is not in the other agent's memory")
            out = self._memory[piece.offset : piece.offset + piece.size_bytes]
            try:
                found = os.preadv(fd, [out], at)
            except OSError as error:
                raise TierError(f"cannot be read: {error.strerror}") from error
            if found != piece.size_bytes:
                raise TierError("the other agent's memory is shorter than it said")
        return _Done()

    def progress(self) -> None:
        """As of `Agent`."""
