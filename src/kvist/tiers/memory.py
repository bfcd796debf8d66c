"""The readable reference of `LowerTier`: a dictionary under a byte cap, first in, first out."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass

from kvist.core.errors import ClosedError, TierFullError, TierTimeout
from kvist.core.keys import Key
from kvist.core.outcome import Outcome
from kvist.native import checksum
from kvist.tiers.protocol import Payload

_LOCK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block's bytes with their checksum."""

    parent: Key | None
    data: bytes
    digest: int


class MemoryTier:
    """Blocks in `medium`, oldest first. A medium that outlives the tier is as good as a disk."""

    def __init__(
        self, *, capacity_bytes: int, medium: MutableMapping[Key, StoredBlock] | None = None
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._medium: MutableMapping[Key, StoredBlock] = {} if medium is None else medium
        self._lock = threading.Lock()
        self._closed = False

    def contains(self, key: Key) -> bool:
        return not self._closed and key in self._medium

    def put(self, payloads: Sequence[Payload]) -> None:
        with self._locked():
            for payload in payloads:
                if payload.key in self._medium:
                    continue
                data = bytes(payload.data)
                self._make_room(len(data))
                self._medium[payload.key] = StoredBlock(payload.parent, data, checksum(data))

    def read_into(self, key: Key, out: memoryview) -> Outcome:
        with self._locked():
            block = self._medium.get(key)
            out = out.cast("B")
            if block is None or len(out) != len(block.data):
                return Outcome.MISS
            out[:] = block.data
            if checksum(out) != block.digest:
                del self._medium[key]
                return Outcome.MISS
            return Outcome.HIT

    def remove(self, keys: Iterable[Key]) -> None:
        with self._locked():
            for key in keys:
                self._medium.pop(key, None)

    def close(self) -> None:
        self._closed = True

    def _make_room(self, size_bytes: int) -> None:
        if size_bytes > self._capacity_bytes:
            raise TierFullError(
                errno.ENOSPC, f"{size_bytes} bytes exceed the cap of {self._capacity_bytes}"
            )
        used = sum(len(b.data) for b in self._medium.values())
        while used + size_bytes > self._capacity_bytes:
            oldest = next(iter(self._medium))
            used -= len(self._medium.pop(oldest).data)

    def _locked(self) -> _Held:
        if self._closed:
            raise ClosedError("the memory tier was closed")
        return _Held(self._lock)


class _Held:
    """Holds a lock, waiting at most `_LOCK_TIMEOUT_S`."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            raise TierTimeout(errno.ETIMEDOUT, "the memory tier's lock was not free")

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
