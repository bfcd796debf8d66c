"""A circuit breaker: a medium that keeps failing is treated as absent, and asked again by itself.

CLOSED lets everything pass. `threshold` failures within `window_s` make it OPEN: nothing passes.
After a jittered delay it is HALF_OPEN: one probe passes. A probe that succeeds closes it; one that
fails, or that has not answered when the next delay is over, opens it for twice as long, up to
`probe_max_s`. There is no lock here: the store's lock guards it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum


class BreakerState(Enum):
    """What a breaker lets pass: everything, nothing, one probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """One side (read or write) of one medium."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        random: Callable[[], float],
        threshold: int = 5,
        window_s: float = 10.0,
        probe_s: float = 1.0,
        probe_max_s: float = 30.0,
    ) -> None:
        """`random` draws from [0, 1): a delay is 0.5 to 1.5 times its nominal length."""
        self._clock = clock
        self._random = random
        self._threshold = threshold
        self._window_s = window_s
        self._probe_s = probe_s
        self._probe_max_s = probe_max_s
        self._failures: deque[float] = deque(maxlen=threshold)
        self._open = False
        self._delay_s = probe_s
        self._probe_at_s = 0.0
        self._probing = False
        self.opened = 0
        self.failed = 0

    @property
    def state(self) -> BreakerState:
        if not self._open:
            return BreakerState.CLOSED
        due = self._probing or self._clock() >= self._probe_at_s
        return BreakerState.HALF_OPEN if due else BreakerState.OPEN

    def peek(self) -> bool:
        """Whether `acquire` would let a call pass now."""
        return not self._open or self._clock() >= self._probe_at_s

    def acquire(self) -> bool:
        """Asks for one call; when half-open it becomes the probe."""
        if not self._open:
            return True
        if not self.peek():
            return False
        if self._probing:
            self._lengthen()
        self._probing = True
        self._schedule()  # a probe that never answers is replaced when this delay is over
        return True

    def succeed(self) -> None:
        """Reports a call that worked; late answers from before it opened do not close it."""
        if self._open and self._probing:
            self._open = False
            self._probing = False
            self._delay_s = self._probe_s
            self._failures.clear()

    def fail(self) -> None:
        """Reports a call that failed."""
        now = self._clock()
        self.failed += 1
        if self._open:
            self._reopen()
            return
        self._failures.append(now)
        if len(self._failures) == self._threshold and now - self._failures[0] <= self._window_s:
            self._trip()

    def trip(self) -> None:
        """Reports a failure that is certain to repeat (no space): opens at once."""
        self.failed += 1
        if self._open:
            self._reopen()
        else:
            self._trip()

    def wait_s(self) -> float:
        """Seconds until a call could pass; 0 when one could now."""
        return max(0.0, self._probe_at_s - self._clock()) if self._open else 0.0

    def _trip(self) -> None:
        self._open = True
        self.opened += 1
        self._delay_s = self._probe_s
        self._schedule()
        self._lengthen()

    def _reopen(self) -> None:
        if self._probing:  # other calls may have begun before it opened: they change nothing
            self._probing = False
            self._schedule()
            self._lengthen()

    def _schedule(self) -> None:
        self._probe_at_s = self._clock() + self._delay_s * (0.5 + self._random())

    def _lengthen(self) -> None:
        self._delay_s = min(2.0 * self._delay_s, self._probe_max_s)
