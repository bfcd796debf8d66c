"""Blocks out of a socket in plain Python: the specification of `cpp/answers.hpp`."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from kvist.native.answer import BLOCK, DAMAGED, HIT, KEY_BYTES, MISS, POSITION
from kvist.native.twin import checksum

if TYPE_CHECKING:
    from typing_extensions import Buffer

Taken = tuple[int, int, tuple[int, int] | None]

_TIMEVAL = struct.Struct("ll")
_MOST_S = 1e6


class Source(Protocol):
    """What answers come out of."""

    def fill(self, out: memoryview, until: float) -> None:
        """Fills `out` by `until`, a `time.monotonic()`.

        Raises:
            OSError: it cannot; `TimeoutError`, if it is that late.
        """
        ...

    def ready(self, wait_s: float) -> bool:
        """Whether something is there, or comes within `wait_s`."""
        ...


class Answers:
    """The answers to one request for blocks, which go into `outs`. Not thread-safe."""

    def __init__(self, keys: Sequence[bytes], outs: Sequence[Buffer]) -> None:
        """Block i of the request has `keys[i]` and fills `outs[i]`, which is held while this lives.

        Raises:
            ValueError: there are more keys than buffers or fewer, or a key has not 32 bytes.
            BufferError: a buffer is not writable and contiguous; with C++, a `TypeError` may come.
        """
        if len(keys) != len(outs):
            raise ValueError("as many keys as buffers")
        if any(len(key) != KEY_BYTES for key in keys):
            raise ValueError("a key has 32 bytes")
        self._slots: dict[int, tuple[bytes, memoryview]] = {}
        for i, (key, out) in enumerate(zip(keys, outs, strict=True)):
            view = memoryview(out).cast("B")
            if view.readonly:
                raise BufferError("a buffer is not writable")
            self._slots[i] = bytes(key), view
        self._failure: OSError | ValueError | None = None

    @property
    def left(self) -> int:
        """How many blocks are not answered yet."""
        return len(self._slots)

    def take(self, fd: int, left_s: float, each_s: float, tell_s: float) -> list[Taken]:
        """Takes answers from a blocking stream socket: one, and those that come soon after.

        Changes how long calls on the socket may take. After an error this is of no use.

        Args:
            fd: the socket; nobody else reads from it meanwhile.
            left_s: every answer must be whole by then.
            each_s: an answer must be whole this long after the one before it, or the call.
            tell_s: after so long no more are waited for if there are some, nor taken.

        Returns:
            What was answered: the index in the request; MISS, HIT or DAMAGED; and for a miss as of
            which position there is surely no such block, if that was said. Only of a HIT the
            buffer has the right bytes. Empty only if there was nothing left.

        Raises:
            TimeoutError: an answer is late.
            ValueError: an answer is none to this request.
            OSError: the connection is broken, or the other side has hung up. What was answered
                before an error is returned, and the error raised by the next call.
        """
        with _borrowed(fd) as link:
            return self.take_from(_Socket(link), left_s, each_s, tell_s)

    def take_from(self, source: Source, left_s: float, each_s: float, tell_s: float) -> list[Taken]:
        """As `take`."""
        now = time.monotonic()
        until, tell_at = now + _within(left_s), now + _within(tell_s)
        found: list[Taken] = []
        while self._slots:
            try:
                if self._failure is not None:
                    raise self._failure
                now = time.monotonic()
                if found and (now >= tell_at or not source.ready(tell_at - now)):
                    return found
                found.append(self._take(source, min(until, time.monotonic() + _within(each_s))))
            except (OSError, ValueError) as error:
                if not found:
                    raise
                self._failure = error
                return found
        return found

    def _take(self, source: Source, until: float) -> Taken:
        header = bytearray(BLOCK.size)
        source.fill(memoryview(header), until)
        index, status, size_bytes, expected, key = BLOCK.unpack(header)
        asked, out = self._slots.get(index, (b"", memoryview(b"")))
        if key != asked:
            raise ValueError(f"block {index} was not asked for, or came before")
        taken: Taken = (index, MISS, None)
        if status == MISS and size_bytes == POSITION.size:
            position = bytearray(POSITION.size)
            source.fill(memoryview(position), until)
            incarnation, number = POSITION.unpack(position)
            taken = (index, MISS, (incarnation, number))
        elif status == HIT and size_bytes == out.nbytes:
            source.fill(out, until)
            taken = (index, HIT if checksum(out) == expected else DAMAGED, None)
        elif status != MISS or size_bytes:
            raise ValueError(f"a block of {size_bytes} bytes in place of {out.nbytes}")
        del self._slots[index]
        return taken


class _Socket:
    """A blocking stream socket as a `Source`."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def fill(self, out: memoryview, until: float) -> None:
        while out:
            _limit(self._link, socket.SO_RCVTIMEO, until)
            try:
                count = self._link.recv_into(out, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            if not count:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            out = out[count:]

    def ready(self, wait_s: float) -> bool:
        return comes(self._link, wait_s)


def comes(link: socket.socket, wait_s: float) -> bool:
    """Whether something comes within `wait_s`, if only the end."""
    poll = select.poll()
    poll.register(link, select.POLLIN)
    return bool(poll.poll(max(0.0, wait_s) * 1e3))


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A descriptor as a socket, which stays its owner's."""
    link = socket.socket(fileno=fd)
    try:
        yield link
    finally:
        link.detach()


def _within(left_s: float) -> float:
    return min(max(0.0, left_s), _MOST_S)


def _limit(link: socket.socket, option: int, until: float) -> None:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    value = _TIMEVAL.pack(int(left), max(1, int(left % 1 * 1e6)))
    link.setsockopt(socket.SOL_SOCKET, option, value)
