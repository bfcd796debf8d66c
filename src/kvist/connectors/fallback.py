"""The one place where a failure becomes "recompute": engine hooks never raise.

An exception that leaves a worker hook kills the engine, and one that leaves a scheduler hook kills
every request. So each hook runs under `Fallback.guard`, which turns whatever goes wrong into the
hook's harmless answer, counts it by class, and logs the first of each kind with its traceback.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
D = TypeVar("D")

log = logging.getLogger("kvist.fallback")


class Fallback:
    """Counts what was turned into a recompute, by hook and error class."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()

    def guard(self, hook: str, call: Callable[[], T], *, default: D) -> T | D:
        """`call()`, or `default` if it raises anything but an interrupt."""
        try:
            return call()
        except Exception as error:
            self.record(hook, error)
            return default

    def rescue(self, hook: str, call: Callable[[], None], instead: Callable[[], None]) -> None:
        """`call()`; if it raises, `instead()`, which puts things right and must not raise."""
        try:
            call()
        except Exception as error:
            self.record(hook, error)
            instead()

    def record(self, hook: str, error: Exception) -> None:
        """Counts `error`; logs it with its traceback the first time in this hook."""
        name = type(error).__name__
        self._counts[name] += 1
        if (hook, name) not in self._logged:
            self._logged.add((hook, name))
            log.warning("kvist: %s failed (%s); falling back to recompute", hook, error,
                        exc_info=error)  # fmt: skip

    def take(self) -> dict[str, int]:
        """Counts by error class since the last call."""
        counts, self._counts = dict(self._counts), Counter()
        return counts
