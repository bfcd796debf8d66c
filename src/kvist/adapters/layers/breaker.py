"""Breaker: a medium that keeps failing is not called for a while, and then asked by one call."""

from __future__ import annotations

import errno
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import TypeVar

from kvist.adapters.layers.layer import Layer, Operation
from kvist.adapters.protocol import StorageAdapter
from kvist.core.errors import TierError, TierFullError

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class BreakerLayer(Layer):
    """Opens after `failures` within `window_s`; a probe that works closes it.

    Each probe that fails doubles the pause before the next, up to `most_open_s`; pauses are
    jittered, so that hosts do not all come back at once. A full medium is no failing one.
    """

    def __init__(
        self,
        inner: StorageAdapter,
        *,
        failures: int = 5,
        window_s: float = 30.0,
        open_s: float = 5.0,
        most_open_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(inner)
        self._failures: deque[float] = deque(maxlen=failures)
        self._window_s = window_s
        self._open_s = open_s
        self._most_open_s = most_open_s
        self._clock = clock
        self._draw = draw
        self._lock = Lock()
        self._pause_s = open_s
        self._closed_again_s: float | None = None  # while open: when the next probe may pass
        self.opened = 0

    def passes(self) -> bool:
        """Whether a call would be made now. Takes no lock."""
        probe_at_s = self._closed_again_s
        return probe_at_s is None or self._clock() >= probe_at_s

    def around(self, operation: Operation, size_bytes: int, call: Callable[[], _T]) -> _T:
        """Makes the call, unless the medium rests.

        Raises:
            TierError: it rests, or the call failed.
        """
        self._enter()
        try:
            result = call()
        except TierFullError:
            self._succeed()
            raise
        except TierError as error:
            self._fail(error)
            raise
        self._succeed()
        return result

    def _enter(self) -> None:
        with self._lock:
            if self._closed_again_s is None:
                return
            now = self._clock()
            if now < self._closed_again_s:
                raise TierError(errno.EHOSTDOWN, "the medium keeps failing and is left alone")
            # One probe; if it never answers, another may try when the pause is over again.
            self._closed_again_s = now + self._jittered()

    def _succeed(self) -> None:
        with self._lock:
            if self._closed_again_s is not None:
                _log.warning("the medium works again")
                self._closed_again_s = None
                self._pause_s = self._open_s
                self._failures.clear()

    def _fail(self, error: TierError) -> None:
        with self._lock:
            now = self._clock()
            if self._closed_again_s is not None:
                self._pause_s = min(2 * self._pause_s, self._most_open_s)
                self._closed_again_s = now + self._jittered()
                return
            self._failures.append(now)
            full = len(self._failures) == self._failures.maxlen
            if full and now - self._failures[0] <= self._window_s:
                _log.warning("the medium keeps failing and is left alone: %s", error)
                self.opened += 1
                self._pause_s = self._open_s
                self._closed_again_s = now + self._jittered()

    def _jittered(self) -> float:
        return self._pause_s * (0.5 + self._draw())
