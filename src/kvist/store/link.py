"""The tier below, seen with suspicion: two breakers and a watch on calls that do not return.

Reads and writes are judged apart: a full medium is still good to read. A call that has been under
way for `stuck_s` makes its side count as absent until it returns, whatever the breaker says, so a
hung medium costs one deadline and then nothing.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Thread
from typing import Protocol, runtime_checkable

from kvist.core.errors import KvistError, TierFullError, TierTimeout
from kvist.core.keys import Key
from kvist.core.outcome import ReadTotals, Tier
from kvist.store.breaker import Breaker, BreakerState
from kvist.tiers.protocol import LowerTier, RunFinder, Stacked, TellsOwn

_log = logging.getLogger(__name__)


@runtime_checkable
class Clearable(Protocol):
    """A tier that can forget everything, also blocks that this process never saw."""

    def clear(self) -> None:
        """Forgets every block for good."""
        ...


class LowerLink:
    """State about one lower tier. Called under the store's lock where not said otherwise."""

    def __init__(
        self,
        tier: LowerTier,
        name: Tier,
        *,
        read: Breaker,
        write: Breaker,
        io_threads: int,
        stuck_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.tier = tier
        self.name = name
        self.read = read
        self.write = write
        self._io_threads = io_threads
        self._stuck_s = stuck_s
        self._clock = clock
        self._finder = tier if isinstance(tier, RunFinder) else None
        self._stack = tier if isinstance(tier, Stacked) else None
        self._own = tier if isinstance(tier, TellsOwn) else None
        self._reads: dict[int, float] = {}  # ticket → when the call began
        self._put_began: float | None = None
        self._tickets = 0
        self._writer_lost = False
        self._read_bytes = 0
        self._busy_s = 0.0
        self._busy_since = 0.0  # while any read is under way

    def contains_run(self, keys: Sequence[Key]) -> int:
        """How many keys from the first on are below. Called without the store's lock."""
        if self._finder is not None:
            return self._finder.contains_run(keys)
        return next((i for i, key in enumerate(keys) if not self.tier.contains(key)), len(keys))

    def tiers_of(self, keys: Sequence[Key]) -> tuple[Tier, ...]:
        """On which medium below each of `keys` is, all of which are there."""
        return (self.name,) * len(keys) if self._stack is None else self._stack.tiers_of(keys)

    def keeps(self, key: Key) -> bool:
        """Whether a block is stored below, so that it need not be written."""
        return self.tier.contains(key) if self._own is None else self._own.keeps(key)

    def holds(self, key: Key) -> bool:
        """Whether a block is on this host's own medium below."""
        return self.tier.contains(key) if self._own is None else self._own.holds(key)

    def lacks(self, key: Key) -> bool:
        """Whether a block that was read from another host should be written below."""
        return self._own is not None and self._own.lacks(key)

    def readable(self) -> bool:
        """Whether the tier counts as present for reading now."""
        return self.read.peek() and not self.reads_stalled()

    def writable(self) -> bool:
        """Whether blocks can be expected to get down there soon."""
        return self.write.peek() and not self._writer_lost and not self._is_stuck(self._put_began)

    def reads_stalled(self) -> bool:
        """Whether every io thread is dead or sits in a call that does not return."""
        stuck = sum(self._is_stuck(began) for began in self._reads.values())
        return stuck >= self._io_threads

    def begin_read(self) -> int | None:
        """A ticket for one read, or `None` when the breaker is open."""
        if not self.read.acquire():
            return None
        self._tickets += 1
        now = self._clock()
        if not self._reads:
            self._busy_since = now
        self._reads[self._tickets] = now
        return self._tickets

    def go_on_reading(self, ticket: int) -> None:
        """A read of many blocks has brought one more: it is alive."""
        self._reads[ticket] = self._clock()

    def count_read(self, size_bytes: int) -> None:
        """A block has arrived whole."""
        self._read_bytes += size_bytes

    def read_totals(self) -> Mapping[Tier, ReadTotals]:
        """What was read so far, by medium; a read under way counts as busy up to now."""
        if self._stack is not None:
            return self._stack.read_totals()
        under_way_s = self._clock() - self._busy_since if self._reads else 0.0
        return {self.name: ReadTotals(self._read_bytes, self._busy_s + under_way_s)}

    def probing(self) -> bool:
        """Whether the next read asks if the medium works again; then one block is enough."""
        return self.read.state is not BreakerState.CLOSED

    def end_read(self, ticket: int, error: Exception | None) -> None:
        """Reports how a read ended; one that took too long is a failure too."""
        slow = self._is_stuck(self._reads.pop(ticket))
        if not self._reads:
            self._busy_s += self._clock() - self._busy_since
        if error is None and not slow:
            self.read.succeed()
            return
        self.read.fail()
        _log.warning("%s: read failed: %s", self.name.value, error or "too slow")

    def begin_put(self) -> bool:
        """Whether a put may begin now."""
        if not self.write.acquire():
            return False
        self._put_began = self._clock()
        return True

    def end_put(self, error: Exception | None) -> None:
        """Reports how a put ended."""
        slow = self._is_stuck(self._put_began)
        self._put_began = None
        if isinstance(error, TierFullError):
            self.write.trip()
        elif error is not None or slow:
            self.write.fail()
        else:
            self.write.succeed()
            return
        _log.warning("%s: write failed: %s", self.name.value, error or "too slow")

    def lose_reader(self) -> None:
        """An io thread dies of an error that the tier may not raise."""
        self._io_threads -= 1

    def lose_writer(self) -> None:
        """The writer thread dies of an error that the tier may not raise."""
        self._writer_lost = True

    def close_tier(self, timeout_s: float) -> None:
        """Closes the tier; one that does not come back in time is left to its own recovery.

        Raises:
            TierError: the tier failed to close.
        """
        self._in_time(self.tier.close, timeout_s)

    def demand(self, what: str, call: Callable[[], None]) -> None:
        """Does what a caller waits for, but no longer than `stuck_s`. Without the store's lock.

        Raises:
            TierError: the tier failed, or (`TierTimeout`) has not come back yet.
        """
        if not self._in_time(call, self._stuck_s):
            late = f"{self.name.value}: {what} has not come back within {self._stuck_s:g} s"
            raise TierTimeout(errno.ETIMEDOUT, late)

    def _in_time(self, call: Callable[[], None], timeout_s: float) -> bool:
        """Whether `call` has returned within the time; raises what it raises."""
        errors: list[KvistError | OSError] = []

        def run() -> None:
            try:
                call()
            except (KvistError, OSError) as error:
                errors.append(error)

        runner = Thread(target=run, name="kvist-below", daemon=True)
        runner.start()
        runner.join(timeout_s)
        for error in errors:
            raise error
        return not runner.is_alive()

    def forget(self, keys: Iterable[Key]) -> None:
        """Removes blocks that were cleared while they were on their way down; best effort."""
        try:
            self.tier.remove(keys)
        except (KvistError, OSError) as error:
            _log.warning("%s: remove failed: %s", self.name.value, error)

    def _is_stuck(self, began: float | None) -> bool:
        return began is not None and self._clock() - began >= self._stuck_s


def present_run(
    keys: Sequence[Key], tiers: Sequence[Tier | None], link: LowerLink | None
) -> tuple[Tier, ...]:
    """Where each block is, up to the first that is nowhere.

    `tiers[i]` says whether block i is above `link`; the others are looked up there in one call.
    """
    missing = tiers.count(None)
    first = tiers.index(None) if missing else len(tiers)
    head = (Tier.DRAM,) * first
    if link is None or not missing:
        return head
    if first + missing == len(tiers):
        return head + link.tiers_of(keys[first : first + link.contains_run(keys[first:])])
    lacking = [key for key, tier in zip(keys, tiers, strict=True) if tier is None]
    below = iter(link.tiers_of(lacking[: link.contains_run(lacking)]))
    found = list(head)
    for tier in tiers[first:]:
        place = next(below, None) if tier is None else tier
        if place is None:
            break
        found.append(place)
    return tuple(found)
