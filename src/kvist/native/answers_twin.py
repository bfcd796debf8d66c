"""Blocks out of a socket in plain Python: the specification of `cpp/answers.hpp`."""

from __future__ import annotations

import errno
import os
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

    def receive(self, out: memoryview, until: float) -> int:
        """Receives into `out`; how many bytes: 0 if none come by `until`, a `time.monotonic()`.

        Raises:
            OSError: the connection is broken, or the other side has hung up.
        """
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
        self._header = bytearray(BLOCK.size)
        self._next = memoryview(self._header)  # what comes next
        self._got = 0  # bytes of it that are there
        self._begun: tuple[int, int, int] | None = None  # index, status, checksum of an answer
        self._waited_s = 0.0  # for this answer, in calls before this one

    @property
    def left(self) -> int:
        """How many blocks are not answered yet."""
        return len(self._slots)

    def take(self, fd: int, left_s: float, each_s: float, tell_s: float) -> list[Taken]:
        """Takes the answers that come from a blocking stream socket.

        Changes how long calls on the socket may take. After an error this is of no use.

        Args:
            fd: the socket; nobody else reads from it meanwhile.
            left_s: every answer must be whole by then.
            each_s: an answer must be whole when so long was waited after the one before it.
            tell_s: after so long this returns; the next call goes on in the middle of an answer.

        Returns:
            What was answered, maybe nothing: the index in the request; MISS, HIT or DAMAGED; and
            for a miss as of which position there is surely no such block, if that was said. Only
            of a HIT the buffer has the right bytes.

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
                taken = self._step(source, until, _within(each_s), tell_at)
            except (OSError, ValueError) as error:
                if not found:
                    raise
                self._failure = error
                return found
            if taken is not None:
                found.append(taken)
            if taken is None or time.monotonic() >= tell_at:
                return found
        return found

    def _step(self, source: Source, until: float, each_s: float, tell_at: float) -> Taken | None:
        """The next answer; `None` if it is time to tell."""
        began = time.monotonic()
        late = min(until, began + each_s - self._waited_s)
        there = self._fill(source, late, tell_at)
        if there and self._begun is None:
            self._begin()
            there = self._fill(source, late, tell_at)
        if there:
            return self._end()
        self._waited_s += time.monotonic() - began
        return None

    def _fill(self, source: Source, late: float, tell_at: float) -> bool:
        """Whether what comes next is there; else it is time to tell."""
        end = min(late, tell_at)
        while self._got < self._next.nbytes:
            self._got += source.receive(self._next[self._got :], end)
            now = time.monotonic()
            if self._got < self._next.nbytes and now >= end:
                if now >= late:
                    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
                return False
        return True

    def _begin(self) -> None:
        """The header is there: what comes now is a block, a position or nothing."""
        index, status, size_bytes, expected, key = BLOCK.unpack(self._header)
        asked, out = self._slots.get(index, (b"", memoryview(b"")))
        if key != asked:
            raise ValueError(f"block {index} was not asked for, or came before")
        if status == HIT and size_bytes == out.nbytes:
            self._next = out
        elif status == MISS and size_bytes in (0, POSITION.size):
            self._next = memoryview(bytearray(size_bytes))
        else:
            raise ValueError(f"a block of {size_bytes} bytes in place of {out.nbytes}")
        self._begun, self._got = (index, status, expected), 0

    def _end(self) -> Taken:
        """The answer is whole."""
        assert self._begun is not None, "an answer ends that has begun"
        index, status, expected = self._begun
        taken: Taken = (index, MISS, None)
        if status == HIT:
            taken = (index, HIT if checksum(self._next) == expected else DAMAGED, None)
        elif self._next.nbytes:
            incarnation, number = POSITION.unpack(self._next)
            taken = (index, MISS, (incarnation, number))
        del self._slots[index]
        self._next, self._got = memoryview(self._header), 0
        self._begun, self._waited_s = None, 0.0
        return taken


class _Socket:
    """A blocking stream socket as a `Source`."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def receive(self, out: memoryview, until: float) -> int:
        left = max(1e-6, until - time.monotonic())
        value = _TIMEVAL.pack(int(left), max(1, int(left % 1 * 1e6)))
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        try:
            count = self._link.recv_into(out, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            return 0
        if not count:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        return count


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
