"""Retry: a call that failed is made again, a few times, after growing, jittered pauses."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from threading import Event
from typing import TypeVar

from kvist.adapters.layers.layer import Layer, Operation
from kvist.adapters.protocol import StorageAdapter
from kvist.core.errors import TierError, TierFullError

_T = TypeVar("_T")


class RetryLayer(Layer):
    """Every operation may be repeated (see `Layer`); what is full or closed stays so."""

    def __init__(
        self,
        inner: StorageAdapter,
        *,
        retries: int = 2,
        pause_s: float = 0.05,
        most_pause_s: float = 1.0,
        budget_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        rest: Callable[[float], object] | None = None,
    ) -> None:
        """No attempt begins later than `budget_s` after the first.

        A pause is drawn between nothing and its nominal length, which doubles each time.
        """
        super().__init__(inner)
        self._retries = retries
        self._pause_s = pause_s
        self._most_pause_s = most_pause_s
        self._budget_s = budget_s
        self._clock = clock
        self._draw = draw
        self._rest = rest or Event().wait
        self.retried = 0
        self.given_up = 0

    def around(self, operation: Operation, size_bytes: int, call: Callable[[], _T]) -> _T:
        """Makes the call until it works, or raises the last error."""
        began_s = self._clock()
        for attempt in range(self._retries):
            try:
                return call()
            except TierFullError:
                raise
            except TierError:
                pause_s = self._draw() * min(self._pause_s * 2**attempt, self._most_pause_s)
                if self._clock() + pause_s - began_s > self._budget_s:
                    self.given_up += 1
                    raise
                self.retried += 1
                self._rest(pause_s)
        return call()
