"""The readable reference of `StorageAdapter`: a dictionary under a cap, first in, first out."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvist.adapters.protocol import (
    Fetched,
    Got,
    Listed,
    NewObject,
    OpenState,
    Page,
    Put,
    PutReport,
    Wanted,
    answer,
    check_names,
    check_prefix,
)
from kvist.core.errors import TierFullError, TierTimeout

_LOCK_TIMEOUT_S = 60.0


class MemoryMedium:
    """Objects that outlive an adapter, as those on a server do; several adapters may share it."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[dict[str, bytes]]:
        """The objects, for one caller at a time.

        Raises:
            TierTimeout: the lock was not free for a minute.
        """
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            raise TierTimeout(errno.ETIMEDOUT, "the memory medium's lock was not free")
        try:
            yield self.objects
        finally:
            self._lock.release()


class MemoryAdapter:
    """A `StorageAdapter` over a `MemoryMedium`."""

    def __init__(
        self, medium: MemoryMedium | None = None, *, capacity_bytes: int | None = None
    ) -> None:
        """Without `capacity_bytes` nothing is ever evicted."""
        self._medium = medium or MemoryMedium()
        self._capacity_bytes = capacity_bytes
        self._state = OpenState("memory")

    def get(self, wanted: Sequence[Wanted]) -> list[Fetched]:
        self._state.demand()
        check_names(w.name for w in wanted)
        with self._medium.held() as objects:
            return [self._answer(objects.get(w.name), w) for w in wanted]

    def put(self, objects: Sequence[NewObject]) -> PutReport:
        self._state.demand()
        check_names(o.name for o in objects)
        outcomes: list[Put] = []
        evicted: list[str] = []
        with self._medium.held() as there:
            for new in objects:
                if new.name in there:
                    outcomes.append(Put.PRESENT)
                    continue
                evicted += self._make_room(there, new.size_bytes)
                there[new.name] = b"".join(new.parts)
                outcomes.append(Put.STORED)
        return PutReport(tuple(outcomes), tuple(evicted))

    def delete(self, names: Sequence[str]) -> None:
        self._state.demand()
        check_names(names)
        with self._medium.held() as objects:
            for name in names:
                objects.pop(name, None)

    def list_page(self, prefix: str, *, cursor: str | None = None, limit: int = 1000) -> Page:
        self._state.demand()
        check_prefix(prefix)
        with self._medium.held() as objects:
            found = sorted(n for n in objects if n.startswith(prefix) and n > (cursor or ""))
            entries = tuple(Listed(n, len(objects[n])) for n in found[:limit])
        return Page(entries, entries[-1].name if len(found) > limit else None)

    def close(self) -> None:
        self._state.closed = True

    def _make_room(self, there: dict[str, bytes], size_bytes: int) -> list[str]:
        evicted: list[str] = []
        if self._capacity_bytes is None:
            return evicted
        if size_bytes > self._capacity_bytes:
            raise TierFullError(
                errno.ENOSPC, f"{size_bytes} bytes exceed the cap of {self._capacity_bytes}"
            )
        used = sum(map(len, there.values()))
        while used + size_bytes > self._capacity_bytes:
            oldest = next(iter(there))
            used -= len(there.pop(oldest))
            evicted.append(oldest)
        return evicted

    def _answer(self, data: bytes | None, wanted: Wanted) -> Fetched:
        if data is not None and not wanted.into:
            return Fetched(Got.HIT, len(data))
        return answer(None if data is None else memoryview(data), wanted)
