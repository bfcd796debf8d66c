"""Several directories, on several disks, as one tier.

A new block goes to the directory that wins a rendezvous: each directory draws a number from the
key, stretched by its weight, and the highest wins. So a directory that is added takes its share of
new blocks, and nothing moves: look-ups ask the index of every directory, and a block stays where it
is found. A directory that fails is avoided for `rest_s`: its blocks count as absent, new ones go to
the runner-up; then it is asked again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

from kvist.core.errors import ClosedError, TierError, TierFullError, TierTimeout
from kvist.core.keys import Key
from kvist.core.outcome import Outcome
from kvist.native import digest
from kvist.tiers.protocol import ListedBlock, Payload, Space, TellsSpace

_log = logging.getLogger(__name__)
_PUT_TIMEOUT_S = 600.0
_MAX_DRAW = 1 << 64


class Stripe(Protocol):
    """What one directory must be able to do: `SsdTier` is one."""

    def contains(self, key: Key) -> bool: ...
    def present(self, keys: Sequence[Key]) -> bytes: ...
    def put(self, payloads: Sequence[Payload]) -> None: ...
    def read_into(self, key: Key, out: memoryview) -> Outcome: ...
    def read_many(
        self, items: Sequence[tuple[Key, memoryview]]
    ) -> Iterator[tuple[int, Outcome | TierError]]: ...
    def remove(self, keys: Iterable[Key]) -> None: ...
    def tell_evictions(self, tell: Callable[[Sequence[Key]], None]) -> None: ...
    def list_blocks(self, *, newest_first: bool = False) -> Iterator[ListedBlock]: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Member:
    """One directory; `name` decides placement and must stay the same over restarts."""

    name: str
    tier: Stripe
    weight: float
    resting_until_s: float = -math.inf
    failures: int = 0

    def draw(self, key: Key) -> float:
        """This directory's number for `key`; the highest of all wins."""
        drawn = int.from_bytes(digest(self.name.encode() + key)[:8], "little")
        return -self.weight / math.log((drawn + 0.5) / _MAX_DRAW)


class StripedTier:
    """`LowerTier` over directories. Thread-safe."""

    def __init__(
        self,
        members: Sequence[tuple[str, Stripe, float]],
        *,
        rest_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Owns the tiers of `members`: name, tier, and weight (its capacity).

        Raises:
            ValueError: there is none, two have one name, or a weight is not positive.
        """
        if not members or len({name for name, _, _ in members}) < len(members):
            raise ValueError("members must be some, of different names")
        if any(weight <= 0 for _, _, weight in members):
            raise ValueError("a weight is not positive")
        self._members = [_Member(*member) for member in members]
        self._rest_s = rest_s
        self._clock = clock
        self._closed = False
        self._pool = ThreadPoolExecutor(len(members), "kvist-stripe")

    @property
    def failures(self) -> dict[str, int]:
        """How often each directory failed."""
        return {m.name: m.failures for m in self._members}

    def contains(self, key: Key) -> bool:
        """Whether `key` is durable in a directory that works."""
        return self._home(key) is not None

    def contains_run(self, keys: Sequence[Key]) -> int:
        """How many keys from the first on are durable in a directory that works."""
        found = 0  # a byte a key, of all directories
        for member in self._members:
            if self._works(member):
                found |= int.from_bytes(member.tier.present(keys), "big")
        run = found.to_bytes(len(keys), "big").find(b"\0")
        return len(keys) if run < 0 else run

    def put(self, payloads: Sequence[Payload]) -> None:
        """Stores each block where its rendezvous says, or at the runner-up if that fails.

        Raises:
            TierFullError: the last directory asked had no space.
            TierError: no directory took some block; others may have been stored.
            ClosedError: the tier was closed.
        """
        self._demand_open()
        left = [p for p in payloads if self._home(p.key) is None]
        refused: set[int] = set()
        while left:
            groups: dict[int, list[Payload]] = {}
            for payload in left:
                groups.setdefault(self._place(payload.key, refused), []).append(payload)
            failed = self._put_groups(groups)
            left = [p for i in failed for p in groups[i] if self._home(p.key) is None]
            refused |= failed.keys()
            for error in failed.values():
                if left and len(refused) == len(self._members):
                    raise error

    def _put_groups(self, groups: dict[int, list[Payload]]) -> dict[int, TierError]:
        """Puts side by side; returns the directories that failed and why."""
        calls: dict[int, Future[None]] = {}
        failed: dict[int, TierError] = {}
        for i, group in groups.items():
            calls[i] = self._pool.submit(self._members[i].tier.put, group)
        for i, call in calls.items():
            try:
                call.result(timeout=_PUT_TIMEOUT_S)
            except TierError as exc:
                failed[i] = exc
            except TimeoutError:
                failed[i] = TierTimeout(f"{self._members[i].name} did not answer")
        for i, error in failed.items():
            if not isinstance(error, TierFullError):  # what is full can still be read
                self._rest(self._members[i], error)
        return failed

    def read_into(self, key: Key, out: memoryview) -> Outcome:
        """Reads and proves one block; a directory that fails makes it a `MISS`.

        Raises:
            TierError: the only directory failed.
            ClosedError: the tier was closed.
        """
        self._demand_open()
        member = self._home(key)
        if member is None:
            return Outcome.MISS
        try:
            return member.tier.read_into(key, out)
        except TierError as error:
            return self._excuse(member, error)

    def read_many(
        self, items: Sequence[tuple[Key, memoryview]]
    ) -> Iterator[tuple[int, Outcome | TierError]]:
        """Reads the blocks of one directory after the other's; see `BatchReader`.

        Raises:
            ClosedError: the tier was closed.
        """
        self._demand_open()
        return self._read_many(items)

    def _read_many(
        self, items: Sequence[tuple[Key, memoryview]]
    ) -> Iterator[tuple[int, Outcome | TierError]]:
        groups: dict[_Member, list[int]] = {}
        for i, (key, _) in enumerate(items):
            member = self._home(key)
            if member is None:
                yield i, Outcome.MISS
            else:
                groups.setdefault(member, []).append(i)
        for member, indices in groups.items():
            for i, result in member.tier.read_many([items[i] for i in indices]):
                if isinstance(result, TierError) and len(self._members) > 1:
                    yield indices[i], self._excuse(member, result)
                else:
                    yield indices[i], result

    def remove(self, keys: Iterable[Key]) -> None:
        """Forgets blocks in every directory.

        Raises:
            TierError: a directory failed; all were asked.
        """
        self._demand_open()
        keys = list(keys)
        self._each(lambda tier: tier.remove(keys))

    def tell_evictions(self, tell: Callable[[Sequence[Key]], None]) -> None:
        """See `tiers.protocol.TellsEvictions`; a block that another directory has is not gone."""

        def told(keys: Sequence[Key]) -> None:
            gone = [key for key in keys if self._home(key) is None]
            if gone:
                tell(gone)

        for member in self._members:
            member.tier.tell_evictions(told)

    def list_blocks(self, *, newest_first: bool = False) -> Iterator[ListedBlock]:
        """See `tiers.protocol.Lists`; in the order of each directory, one block from each."""
        each = [member.tier.list_blocks(newest_first=newest_first) for member in self._members]
        for blocks in zip_longest(*each):
            yield from (block for block in blocks if block is not None)

    def space(self) -> Space:
        """See `tiers.protocol.TellsSpace`; of all directories together."""
        tiers = (member.tier for member in self._members)
        each = [t.space() or Space(0, 0) for t in tiers if isinstance(t, TellsSpace)]
        return Space(sum(s.used_bytes for s in each), sum(s.capacity_bytes for s in each))

    def clear(self) -> None:
        """Forgets every block in every directory.

        Raises:
            TierError: a directory failed; all were asked.
        """
        self._demand_open()
        self._each(lambda tier: tier.clear())

    def close(self) -> None:
        """Closes every directory. Idempotent.

        Raises:
            TierError: a directory failed; all were asked.
        """
        self._closed = True
        self._pool.shutdown(wait=False)
        self._each(lambda tier: tier.close())

    def _demand_open(self) -> None:
        if self._closed:
            raise ClosedError("the striped SSD tier was closed")

    def _each(self, call: Callable[[Stripe], None]) -> None:
        errors: list[TierError] = []
        for member in self._members:
            try:
                call(member.tier)
            except TierError as exc:
                self._rest(member, exc)
                errors.append(exc)
        for error in errors:
            raise error

    def _home(self, key: Key) -> _Member | None:
        """The directory that has `key`, of those that work."""
        for member in self._members:
            if member.tier.contains(key) and self._works(member):
                return member
        return None

    def _place(self, key: Key, refused: set[int]) -> int:
        """Where a new block goes; those that rest are asked when there is nobody else."""
        asked = [i for i in range(len(self._members)) if i not in refused]
        working = [i for i in asked if self._works(self._members[i])]
        return max(working or asked, key=lambda i: self._members[i].draw(key))

    def _works(self, member: _Member) -> bool:
        return self._clock() >= member.resting_until_s

    def _excuse(self, member: _Member, error: TierError) -> Outcome:
        if len(self._members) == 1:
            raise error
        self._rest(member, error)
        return Outcome.MISS

    def _rest(self, member: _Member, error: TierError) -> None:
        """A failure: the directory is left alone for a while."""
        member.failures += 1
        member.resting_until_s = self._clock() + self._rest_s
        _log.warning("%s rests for %.0f s: %s", member.name, self._rest_s, error)
