"""One connection as the node's loop sees it: what came in parts, what waits to be sent."""

from __future__ import annotations

import select
import socket
from enum import Enum

from kvist.node.protocol import Frames
from kvist.node.sessions import Session

MOST_OUT_BYTES = 8 << 20  # a client that lets more wait for it is cut off
_PAUSE_BYTES = 256 << 10  # from here on nothing more is read from it


class Stage(Enum):
    """How far a connection is."""

    FIRST = "has said nothing yet"
    OPENING = "waits for its answer"
    OPEN = "attached"
    ASKING = "may ask about blocks"
    WAITING = "waits for an answer about blocks"
    LEAVING = "gets its last answer"
    GONE = "closed"


_TALKING = (Stage.FIRST, Stage.OPEN, Stage.ASKING)


class Peer:
    """A connection's state. `life` is the reading end of its life pipe, -1 without one."""

    def __init__(self, connection: socket.socket, leave_at: float) -> None:
        """It must have said what it wants by `leave_at`."""
        self.socket = connection
        self.leave_at = leave_at
        self.stage = Stage.FIRST
        self.name = "unknown"
        self.frames = Frames()
        self.out = bytearray()
        self.session: Session | None = None
        self.life = -1
        self.watched = select.EPOLLIN

    def put(self, data: bytes) -> bool:
        """Queues bytes; false if too much waits already."""
        if len(self.out) + len(data) > MOST_OUT_BYTES:
            return False
        self.out += data
        return True

    def flush(self) -> bool:
        """Sends what the socket takes; false if the connection is broken."""
        try:
            while self.out:
                sent = self.socket.send(self.out)
                del self.out[:sent]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def wants(self) -> int:
        """Which events matter now."""
        takes = self.stage in _TALKING and len(self.out) < _PAUSE_BYTES
        return (select.EPOLLIN if takes else 0) | (select.EPOLLOUT if self.out else 0)
