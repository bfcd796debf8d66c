"""What may wait for a medium, off the loop's thread: a few threads and a bounded queue."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable

from kvist.core.errors import KvistError, StoreError

_log = logging.getLogger(__name__)
_THREADS = 2
_MOST_QUEUED = 1024

Call = Callable[[], object]
Then = Callable[[object], None]


class SlowWork:
    """Runs calls on its threads; what they return, or raise, comes back on the loop's thread."""

    def __init__(self, poke: Callable[[], None]) -> None:
        """`poke` makes the loop call `deliver` soon; it may be called on any thread."""
        self._poke = poke
        self._queue: queue.Queue[tuple[Call, Then] | None] = queue.Queue(_MOST_QUEUED)
        self._done: deque[tuple[Then, object]] = deque()
        self._threads = [
            threading.Thread(target=self._serve, name=f"kvist-slow-{n}", daemon=True)
            for n in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Call, then: Then) -> None:
        """Calls `then` with what `call` returns, or with the error it raises.

        That may be a `KvistError`, an `OSError` or a `ValueError`.

        Raises:
            StoreError: too much is queued.
        """
        try:
            self._queue.put_nowait((call, then))
        except queue.Full:
            raise StoreError(f"{_MOST_QUEUED} calls are waiting already") from None

    def deliver(self) -> None:
        """Calls every `then` that is due; on the loop's thread."""
        while self._done:
            then, result = self._done.popleft()
            then(result)

    def stop(self, timeout_s: float) -> None:
        """Ends the threads that are not stuck in a medium."""
        for _ in self._threads:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return
        for thread in self._threads:
            thread.join(timeout_s)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            call, then = item
            result: object
            try:
                result = call()
            except (KvistError, OSError, ValueError) as error:
                _log.warning("%s", error)
                result = error
            self._done.append((then, result))
            self._poke()
