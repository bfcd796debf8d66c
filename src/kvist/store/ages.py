"""When each block was last used: blocks that nobody uses for a time-to-live are gone.

A block's age is known from its last use in this process; one that this process has not used counts
as used when the store was opened. So nothing expires before `opened + ttl`, and afterwards exactly
the keys are alive that are in `_used` and not too old, wherever their bytes are. The order of
`_used` is that of time, so the oldest are found at its front. The store's lock guards all of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from kvist.core.keys import Key

SWEEP_BLOCKS = 256  # looked at in one go: what a call of the store may pay for expiry
MAX_DOOMED_BLOCKS = 1 << 16


class Ages:
    """Last uses by key, and the keys that have expired but still have bytes below."""

    def __init__(self, ttl_s: float, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._opened_s = clock()
        self._used: OrderedDict[Key, float] = OrderedDict()
        self._doomed: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, key: Key) -> bool:
        return key in self._used

    def use(self, key: Key) -> None:
        """Notes a use; a key that is new here begins its life."""
        self._used[key] = self._clock()
        self._used.move_to_end(key)
        if self._doomed:
            self._doomed.pop(key, None)

    def forget(self, key: Key) -> None:
        """Drops a key that has left every tier."""
        self._used.pop(key, None)

    def clear(self) -> None:
        """Drops everything."""
        self._used.clear()
        self._doomed.clear()

    def live(self, key: Key) -> bool:
        """Whether `key` has not expired."""
        return self._clock() < self._opened_s + self._ttl_s or self._live_at(key, self._clock())

    def live_run(self, keys: Sequence[Key]) -> int:
        """How many keys from the first on have not expired."""
        now = self._clock()
        if now < self._opened_s + self._ttl_s:
            return len(keys)
        known = self._used
        if not self.overdue():  # then what is known is alive
            return next((i for i, key in enumerate(keys) if key not in known), len(keys))
        return next((i for i, key in enumerate(keys) if not self._live_at(key, now)), len(keys))

    def overdue(self) -> bool:
        """Whether a known key has expired and was not swept yet."""
        oldest = next(iter(self._used.values()), None)
        return oldest is not None and self._clock() - oldest >= self._ttl_s

    def expired(self) -> Iterator[Key]:
        """The keys that have expired, oldest first, a bounded number of them."""
        now = self._clock()
        for key, used_s in list(islice(self._used.items(), SWEEP_BLOCKS)):
            if now - used_s < self._ttl_s:
                return
            yield key

    def doom(self, key: Key) -> bool:
        """Queues an expired key for removal below; false if it is queued already.

        Beyond the bound it is not removed, only unreachable.
        """
        self._used.pop(key, None)
        if key in self._doomed or len(self._doomed) >= MAX_DOOMED_BLOCKS:
            return False
        self._doomed[key] = None
        return True

    def next_doomed(self) -> list[Key]:
        """The next keys to be removed below, a bounded number; `bury` them when they are."""
        return list(islice(self._doomed, SWEEP_BLOCKS))

    def bury(self, keys: Iterable[Key]) -> None:
        """They have been removed below."""
        for key in keys:
            self._doomed.pop(key, None)

    @property
    def has_doomed(self) -> bool:
        return bool(self._doomed)

    def _live_at(self, key: Key, now: float) -> bool:
        used_s = self._used.get(key)
        return used_s is not None and now - used_s < self._ttl_s
