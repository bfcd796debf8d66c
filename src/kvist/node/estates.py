"""The arenas that a former node of this host has left, until engines ask for their keyspaces."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvist.store.succession import Legacy

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attach:
    """What an engine needs of a store."""

    fingerprint: bytes
    layout: str
    block_bytes: int


class LifeFences:
    """The life pipes of a former node's sessions (`server.py`): who may still touch which slots.

    One thread waits; `pipes` and `close` are for those who know that it does not, or that it has
    ended.
    """

    def __init__(self, pipes: Mapping[int, Iterable[int]]) -> None:
        """Owns the reading ends; the slots of each are those that its session had leased."""
        self._pipes = {fd: frozenset(slots) for fd, slots in pipes.items()}
        self._held = Counter(slot for slots in self._pipes.values() for slot in slots)
        self._poll = select.poll()
        for fd in self._pipes:
            self._poll.register(fd, 0)  # only its end is told

    def wait(self, timeout_s: float) -> Collection[int]:
        """Slots that nobody can touch any more, since the last call; waits for the first."""
        over: list[int] = []
        for fd, _ in self._poll.poll(timeout_s * 1000):
            self._poll.unregister(fd)
            os.close(fd)
            for slot in self._pipes.pop(fd):
                self._held[slot] -= 1
                if not self._held[slot]:
                    over.append(slot)
        return over

    def pipes(self) -> Mapping[int, frozenset[int]]:
        """Pipes that have not ended, and the slots behind each."""
        return dict(self._pipes)

    def close(self) -> None:
        """Nobody asks any more. Idempotent."""
        while self._pipes:
            os.close(self._pipes.popitem()[0])


@dataclass(frozen=True, slots=True, eq=False)
class Left:
    """What a node leaves of a keyspace."""

    attach: Attach
    legacy: Legacy

    def close(self) -> None:
        """Lets go of it: nobody takes it over."""
        self.legacy.fences.close()
        with contextlib.suppress(OSError):
            os.close(self.legacy.fd)


class Estates:
    """What was left and not claimed yet, by keyspace. Thread-safe."""

    def __init__(self, left: Iterable[Left] = ()) -> None:
        self._left = {one.attach.fingerprint: one for one in left}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Left]:
        with self._lock:
            return iter(list(self._left.values()))

    def claim(self, attach: Attach, *, slot_bytes: int, most_bytes: int) -> Legacy | None:
        """What was left of a keyspace, which the caller owns; `None` if it cannot be used.

        Args:
            attach: who wants it: blocks of another layout are not its own.
            slot_bytes: of the arena that is to be opened.
            most_bytes: what that may hold.
        """
        with self._lock:
            left = self._left.pop(attach.fingerprint, None)
        if left is None:
            return None
        legacy = left.legacy
        unlike = left.attach != attach or legacy.slot_bytes != slot_bytes
        if unlike or legacy.size_bytes > most_bytes:
            _log.warning(
                "DRAM starts empty: the former node had %d bytes in slots of %d (%s), this one has "
                "%d in slots of %d (%s)",
                *(legacy.size_bytes, legacy.slot_bytes, left.attach.layout),
                *(most_bytes, slot_bytes, attach.layout),
            )
            left.close()
            return None
        return legacy

    def put_back(self, left: Left) -> None:
        """It was claimed, and the store could not be opened."""
        with self._lock:
            self._left[left.attach.fingerprint] = left

    def keep(self, most: int, *, but: bytes) -> None:
        """Keeps `most` besides that of keyspace `but`, which is about to be claimed."""
        with self._lock:
            others = [fingerprint for fingerprint in self._left if fingerprint != but]
            dropped = [self._left.pop(f) for f in others[: max(0, len(others) - max(0, most))]]
        for left in dropped:
            left.close()

    def close(self) -> None:
        """Lets go of all of it."""
        self.keep(0, but=b"")
