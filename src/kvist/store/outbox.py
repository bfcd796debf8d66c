"""Events leave in the order in which they happened, and never under the store's lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock

from kvist.core.events import KvEvent


class Outbox:
    """Put under the store's lock; sent after it was let go.

    Whoever finds the sending lock taken leaves: its holder looks again before it goes.
    """

    def __init__(self, send: Callable[[KvEvent], None] | None) -> None:
        self._send = send
        self._queue: deque[KvEvent] = deque()
        self._sending = Lock()

    def put(self, event: KvEvent) -> None:
        """Queues an event; caller holds the store's lock, so the order is the store's."""
        if self._send is not None:
            self._queue.append(event)

    def drain(self) -> None:
        """Sends what is queued; caller holds no lock."""
        if self._send is None:
            return
        while self._queue and self._sending.acquire(blocking=False):
            try:
                while self._queue:
                    self._send(self._queue.popleft())
            finally:
                self._sending.release()
