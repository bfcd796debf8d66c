"""Throttle: a token bucket, so that a cache takes no more of a shared link than it was given."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from threading import Event, Lock
from typing import TypeVar

from kvist.adapters.layers.layer import Layer, Operation
from kvist.adapters.protocol import StorageAdapter
from kvist.core.errors import TierTimeout

_T = TypeVar("_T")


class ThrottleLayer(Layer):
    """At most so many bytes a second, both ways together, with bursts of one second's worth.

    A call larger than a burst passes when the bucket is full and leaves it in debt.
    """

    def __init__(
        self,
        inner: StorageAdapter,
        *,
        bytes_per_s: float,
        most_wait_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        rest: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(inner)
        if bytes_per_s <= 0:
            raise ValueError(f"a rate must be positive, not {bytes_per_s}")
        self._bytes_per_s = bytes_per_s
        self._most_wait_s = most_wait_s
        self._clock = clock
        self._rest = rest or Event().wait
        self._lock = Lock()
        self._tokens = bytes_per_s
        self._filled_s = clock()
        self.waited_s = 0.0
        self.refused = 0

    def around(self, operation: Operation, size_bytes: int, call: Callable[[], _T]) -> _T:
        """Makes the call when its turn has come.

        Raises:
            TierTimeout: that would take longer than `most_wait_s`.
        """
        if size_bytes:
            wait_s = self._take(size_bytes)
            if wait_s > 0:
                self._rest(wait_s)
        return call()

    def _take(self, size_bytes: int) -> float:
        """Takes tokens; returns the seconds until they are really there."""
        with self._lock:
            now = self._clock()
            gained = (now - self._filled_s) * self._bytes_per_s
            self._tokens = min(self._bytes_per_s, self._tokens + gained)
            self._filled_s = now
            wanted = min(size_bytes, self._bytes_per_s)
            wait_s = max(0.0, (wanted - self._tokens) / self._bytes_per_s)
            if wait_s > self._most_wait_s:
                self.refused += 1
                raise TierTimeout(errno.ETIMEDOUT, f"{wait_s:.1f} s until there is bandwidth")
            self._tokens -= size_bytes
            self.waited_s += wait_s
            return wait_s
