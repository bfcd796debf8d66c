"""Notes on a medium that forgets nothing by itself: a record, and when its reader gives it up.

Ages are measured by the reader's clock, from when it first saw a note as it is: neither the hosts'
clocks nor the medium's need agree. What has been void for long is removed by whoever announces.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable

import msgspec

_KEPT_TTLS = 10.0  # a void note is removed after so many times its life
MOST_NOTES = 4096


class Note(msgspec.Struct, frozen=True):
    """A record as it was left, and after how many seconds of silence it is void.

    `stamp` differs each time the record is left, where the medium itself does not tell that.
    """

    ttl_s: float
    record: msgspec.Raw
    stamp: str = ""


class Sightings:
    """Since when each note has been as it is, as far as one reader has seen."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds that never go back."""
        self._clock = clock
        self._seen: dict[str, tuple[Hashable, float]] = {}

    def keep(self, names: Container[str]) -> None:
        """Only these notes are there now."""
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}

    def see(self, name: str, state: Hashable) -> None:
        """A note is there; its state differs from what it was if it was left anew."""
        seen = self._seen.get(name)
        if seen is None or seen[0] != state:
            self._seen[name] = (state, self._clock())

    def is_live(self, name: str, ttl_s: float) -> bool:
        """Whether a note is not void yet."""
        return self._silent_s(name) < ttl_s

    def is_waste(self, name: str, ttl_s: float) -> bool:
        """Whether a note has been void for so long that it should be removed."""
        return self._silent_s(name) > _KEPT_TTLS * ttl_s

    def _silent_s(self, name: str) -> float:
        return self._clock() - self._seen[name][1] if name in self._seen else 0.0
