"""An adapter that its first call opens: a medium that is down delays no start."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from threading import Lock

from kvist.adapters.protocol import (
    Fetched,
    NewObject,
    OpenState,
    Page,
    PutReport,
    StorageAdapter,
    Wanted,
)
from kvist.core.errors import FormatError, TierError, TierTimeout

_LOCK_TIMEOUT_S = 60.0


class LateAdapter:
    """Opens with `opener`, again with each call until it works."""

    def __init__(self, opener: Callable[[], StorageAdapter], *, name: str) -> None:
        self._opener = opener
        self._name = name
        self._state = OpenState(name)
        self._lock = Lock()
        self._inner: StorageAdapter | None = None

    def get(self, wanted: Sequence[Wanted]) -> list[Fetched]:
        return self._open().get(wanted)

    def put(self, objects: Sequence[NewObject]) -> PutReport:
        return self._open().put(objects)

    def delete(self, names: Sequence[str]) -> None:
        self._open().delete(names)

    def list_page(self, prefix: str, *, cursor: str | None = None, limit: int = 1000) -> Page:
        return self._open().list_page(prefix, cursor=cursor, limit=limit)

    def close(self) -> None:
        self._state.closed = True
        if self._inner is not None:
            self._inner.close()

    def _open(self) -> StorageAdapter:
        self._state.demand()
        if self._inner is not None:
            return self._inner
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            raise TierTimeout(errno.ETIMEDOUT, f"{self._name} is still being opened")
        try:
            if self._inner is None:
                self._inner = self._opener()
            return self._inner
        except FormatError as error:
            raise TierError(errno.EPROTO, f"{self._name}: {error}") from error
        finally:
            self._lock.release()
