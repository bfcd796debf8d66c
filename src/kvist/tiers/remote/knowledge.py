"""What one host believes to be in the remote: soft, bounded, and never a promise.

A key is believed present, believed absent for a while, or unknown. Wrong beliefs cost little: a
false presence is a miss when it is read, a false absence is computed again. Nothing here does I/O;
the lock is held for dictionary operations only, and `is_present` takes none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from kvist.core.keys import Key


class Knowledge:
    """Beliefs about keys. Thread-safe."""

    def __init__(self, *, most_blocks: int, absent_s: float, clock: Callable[[], float]) -> None:
        """At most `most_blocks` presences and as many absences are kept, the newest."""
        self._most_blocks = most_blocks
        self._absent_s = absent_s
        self._clock = clock
        self._lock = threading.Lock()
        self._present: dict[Key, tuple[int, int]] = {}  # → when last confirmed, and its size
        self._absent: dict[Key, tuple[float, int]] = {}  # → until when, and when found out
        self._now = 0  # counts what was learned: a clock for "since"
        self.forgotten = 0  # presences dropped for the bound

    def __len__(self) -> int:
        return len(self._present)

    @property
    def full(self) -> bool:
        """Whether each new presence drops an old one."""
        return len(self._present) >= self._most_blocks

    def is_present(self, key: Key) -> bool:
        """Whether `key` is believed present: a dictionary look-up, no lock."""
        return key in self._present

    def run(self, keys: Sequence[Key]) -> int:
        """How many keys from the first on are believed present."""
        present = self._present
        return next((i for i, key in enumerate(keys) if key not in present), len(keys))

    def unknown(self, keys: Sequence[Key]) -> list[Key]:
        """Those of `keys` that are believed neither present nor absent."""
        now = self._clock()
        return [
            key
            for key in keys
            if key not in self._present and self._absent.get(key, _NEVER)[0] <= now
        ]

    def mark(self) -> int:
        """The moment before a question is asked, for `add` and `drop` of its answer."""
        return self._now

    def size_bytes(self, key: Key) -> int:
        """What `key` is believed to take there; 0 where that is not known."""
        return self._present.get(key, _NOWHERE)[1]

    def add(self, found: Mapping[Key, int], *, since: int | None = None) -> None:
        """These are there, of so many bytes or 0, unless they were found gone after `since`."""
        with self._lock:
            self._now += 1
            for key, size_bytes in found.items():
                if since is not None and self._absent.get(key, _NEVER)[1] > since:
                    continue
                self._absent.pop(key, None)
                _, known_bytes = self._present.pop(key, _NOWHERE)
                self._present[key] = (self._now, size_bytes or known_bytes)
            excess = len(self._present) - self._most_blocks
            for key in list(islice(self._present, max(0, excess))):
                del self._present[key]
                self.forgotten += 1

    def drop(self, keys: Iterable[Key], *, since: int | None = None) -> None:
        """These are gone, unless they were confirmed after `since`; nobody need ask for a while."""
        until = self._clock() + self._absent_s
        with self._lock:
            self._now += 1
            for key in keys:
                if since is not None and self._present.get(key, _NOWHERE)[0] > since:
                    continue
                self._present.pop(key, None)
                self._absent.pop(key, None)
                self._absent[key] = (until, self._now)
            excess = len(self._absent) - self._most_blocks
            for key in list(islice(self._absent, max(0, excess))):
                del self._absent[key]

    def end_listing(self, since: int) -> int:
        """Drops what a whole listing that began at `since` did not confirm; returns how many."""
        with self._lock:
            gone = [key for key, (seen, _) in self._present.items() if seen <= since]
            for key in gone:
                del self._present[key]
            return len(gone)

    def keys(self) -> list[Key]:
        """All that is believed present."""
        with self._lock:
            return list(self._present)

    def clear(self) -> None:
        """Nothing is known any more."""
        with self._lock:
            self._present.clear()
            self._absent.clear()


_NEVER = (0.0, 0)
_NOWHERE = (0, 0)
