"""Large values over one connection of redis-py's: bytes go from the socket into their buffers.

redis-py makes, checks and keeps connections; its reader gathers a value from many small pieces. So
the two commands that move blocks speak the protocol (RESP 2) themselves: all commands of a call
are sent, then all replies are read. The deadline is that of the whole call, however slowly bytes
drip. A connection on which anything went wrong is closed, since its next bytes belong to an old
question.
"""

from __future__ import annotations

import errno
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvist.adapters.protocol import Fetched, Got, Put, Wanted
from kvist.core.errors import TierError, TierFullError, TierTimeout

_READ_AHEAD_BYTES = 4096
_MOST_LINE_BYTES = 4096
_BULK = re.compile(rb"\$(-1|[0-9]{1,18})")
_SKIP_BYTES = 1 << 16
_JOINED_BYTES = 1 << 16  # smaller parts are sent as one

Word = Sequence[memoryview | bytes]


class Wire:
    """One call's use of a connection, which is in sync at its begin and at its end."""

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self._sock = sock
        self._deadline_s = deadline_s
        self._ahead = bytearray()
        self.failure: bytes | None = None  # the first error reply

    def send(self, commands: Sequence[Sequence[Word]]) -> None:
        """Sends commands, each a sequence of words, each in parts."""
        small = bytearray()
        for words in commands:
            small += b"*%d\r\n" % len(words)
            for word in words:
                small += b"$%d\r\n" % sum(len(part) for part in word)
                for part in word:
                    if len(part) < _JOINED_BYTES:
                        small += part
                    else:
                        self._send_all(small)
                        self._send_all(part)
                        small = bytearray()
                small += b"\r\n"
        self._send_all(small)

    def read_value(self, wanted: Wanted) -> Fetched:
        """The reply to a `GET`."""
        size_bytes = self._bulk_size()
        if size_bytes is None:
            return Fetched(Got.ABSENT)
        fits = size_bytes == wanted.size_bytes
        if fits:
            for part in wanted.into:
                self._fill(part.cast("B"))
        else:
            self._skip(size_bytes)
        self._skip(2)
        return Fetched(Got.HIT if fits else Got.SIZE, size_bytes)

    def read_stored(self) -> Put:
        """The reply to a `SET … NX`."""
        line = self._line()
        if line.startswith(b"-"):
            self.failure = self.failure or line[1:]
        return Put.STORED if line == b"+OK" else Put.PRESENT

    def _bulk_size(self) -> int | None:
        line = self._line()
        if line.startswith(b"-"):
            self.failure = self.failure or line[1:]
            return None
        if _BULK.fullmatch(line) is None:
            raise TierError(errno.EPROTO, f"redis answered {line[:40]!r} to a GET")
        size_bytes = int(line[1:])
        return None if size_bytes < 0 else size_bytes

    def _line(self) -> bytes:
        while (end := self._ahead.find(b"\r\n")) < 0:
            if len(self._ahead) > _MOST_LINE_BYTES:
                raise TierError(errno.EPROTO, "redis sent a line without an end")
            self._wait()
            more = self._sock.recv(_READ_AHEAD_BYTES)
            if not more:
                raise TierError(errno.ECONNRESET, "redis closed the connection")
            self._ahead += more
        line = bytes(self._ahead[:end])
        del self._ahead[: end + 2]
        return line

    def _fill(self, out: memoryview) -> None:
        at = min(len(out), len(self._ahead))
        out[:at] = self._ahead[:at]
        del self._ahead[:at]
        while at < len(out):
            self._wait()
            count = self._sock.recv_into(out[at:])
            if not count:
                raise TierError(errno.ECONNRESET, "redis closed the connection")
            at += count

    def _skip(self, size_bytes: int) -> None:
        scratch = memoryview(bytearray(min(size_bytes, _SKIP_BYTES)))
        while size_bytes:
            part = scratch[: min(size_bytes, len(scratch))]
            self._fill(part)
            size_bytes -= len(part)

    def _send_all(self, data: memoryview | bytes | bytearray) -> None:
        left = memoryview(data).cast("B")
        while left:
            self._wait()
            left = left[self._sock.send(left) :]

    def _wait(self) -> None:
        """Gives the next call what is left of the time."""
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TierTimeout(errno.ETIMEDOUT, "redis has not answered before the deadline")
        self._sock.settimeout(left_s)


@contextmanager
def wire(pool: Any, timeout_s: float) -> Iterator[Wire]:
    """A connection of `pool` for one call of at most `timeout_s`.

    Raises:
        TierTimeout: the call took longer.
        TierFullError: the server has no room.
        TierError: the connection or the server failed.
    """
    deadline_s = time.monotonic() + timeout_s
    connection = pool.get_connection()
    in_sync = False
    try:
        used = Wire(connection._sock, deadline_s)
        yield used
        connection._sock.settimeout(timeout_s)
        in_sync = True
    except TimeoutError as error:
        if isinstance(error, TierError):
            raise
        raise TierTimeout(errno.ETIMEDOUT, f"redis: {error}") from error
    except OSError as error:
        if isinstance(error, TierError):
            raise
        raise TierError(error.errno or errno.EIO, f"redis: {error}") from error
    finally:
        if not in_sync:
            connection.disconnect()
        pool.release(connection)
    if used.failure is not None:
        text = used.failure.decode(errors="replace")
        kind = TierFullError if text.startswith("OOM") else TierError
        raise kind(errno.ENOSPC if kind is TierFullError else errno.EIO, f"redis: {text}")
