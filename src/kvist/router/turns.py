"""A lock of which the one that holds it for long can let others have a turn."""

from __future__ import annotations

import threading
from types import TracebackType

_STUCK_S = 60.0


class Turns:
    """A lock as a context. Who calls `pause` under it goes on when those that waited had it.

    Releasing a lock and taking it again would not do: whoever waits has to wake first. Here who
    waits stands at a door of its own, which `pause` passes behind it.
    """

    def __init__(self) -> None:
        self._door = threading.Lock()
        self._lock = threading.Lock()

    def pause(self) -> None:
        """Lets whoever waits have the lock once. The caller holds it, before and after."""
        if self._door.locked():
            self._lock.release()
            self.__enter__()

    def __enter__(self) -> None:
        """Takes it.

        Raises:
            TimeoutError: somebody holds it for so long that it must be stuck.
        """
        with self._door:
            if not self._lock.acquire(timeout=_STUCK_S):
                raise TimeoutError("the lock is held for too long")

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._lock.release()
