"""A block out of a socket in plain Python: the specification of `cpp/receive.hpp`."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from typing import TYPE_CHECKING

from kvist.native.twin import checksum

if TYPE_CHECKING:
    from typing_extensions import Buffer

_TIMEVAL = struct.Struct("ll")
_MOST_S = 1e6


def receive_checksum(fd: int, out: Buffer, left_s: float) -> tuple[int, int]:
    """Fills `out` from a blocking stream socket; changes how long its calls may take.

    Args:
        fd: the socket; nobody else reads from it meanwhile.
        out: writable and contiguous.
        left_s: `out` must be full by then.

    Returns:
        How many bytes came, fewer than asked for if the other side hung up, and then `checksum` of
        `out`, or 0 if it is not full.

    Raises:
        TimeoutError: it is not full in time; some of it may be written.
        OSError: the connection is broken.
    """
    view = memoryview(out).cast("B")
    until = time.monotonic() + min(max(0.0, left_s), _MOST_S)
    filled = 0
    link = socket.socket(fileno=fd)
    try:
        while filled < view.nbytes:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            limit = _TIMEVAL.pack(int(left), max(1, int(left % 1 * 1e6)))
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            try:
                count = link.recv_into(view[filled:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            if not count:
                return filled, 0
            filled += count
    finally:
        link.detach()
    return filled, checksum(view)
