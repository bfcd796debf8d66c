"""Timeout: no call takes longer than its deadline, whatever its medium does.

A call is made on a thread of this layer and abandoned when the deadline comes. An abandoned call
may still move bytes, any time later, so it never sees the caller's memory: what it reads it puts
into buffers of its own, which are copied when it was in time, and what it writes was copied first.
A medium that holds as many calls as there are threads is not called again until one is back.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import TypeVar

from kvist.adapters.crew import Crew
from kvist.adapters.layers.layer import Layer, Operation
from kvist.adapters.protocol import (
    Fetched,
    Got,
    NewObject,
    Page,
    PutReport,
    StorageAdapter,
    Wanted,
    check_names,
    check_prefix,
)
from kvist.core.errors import TierTimeout

_T = TypeVar("_T")


class TimeoutLayer(Layer):
    """Bounds every call but `close`."""

    def __init__(self, inner: StorageAdapter, *, timeout_s: float, threads: int = 16) -> None:
        """At most `threads` calls are under way, abandoned ones among them."""
        super().__init__(inner)
        self._timeout_s = timeout_s
        self._threads = threads
        self._crew = Crew(threads, name="kvist-deadline")
        self.late = 0

    def around(self, operation: Operation, size_bytes: int, call: Callable[[], _T]) -> _T:
        """Makes the call elsewhere and waits for it.

        Raises:
            TierTimeout: it has not come back, or too many others have not.
        """
        if self._crew.busy >= self._threads:
            self.late += 1
            raise TierTimeout(errno.ETIMEDOUT, f"{self._threads} calls have not come back")
        future = self._crew.submit(call)
        try:
            return future.result(timeout=self._timeout_s)
        except FutureTimeout as error:
            if future.done():  # just now, or it was the medium's own timeout
                return future.result(timeout=0)
            future.cancel()
            self.late += 1
            text = f"{operation.value} has not come back within {self._timeout_s:g} s"
            raise TierTimeout(errno.ETIMEDOUT, text) from error

    def get(self, wanted: Sequence[Wanted]) -> list[Fetched]:
        check_names(w.name for w in wanted)
        own = [
            Wanted(w.name, tuple(memoryview(bytearray(part.nbytes)) for part in w.into))
            for w in wanted
        ]
        fetched = self.around(Operation.GET, 0, partial(self.inner.get, own))
        for theirs, ours, answer in zip(wanted, own, fetched, strict=True):
            if answer.got is Got.HIT:
                for out, part in zip(theirs.into, ours.into, strict=True):
                    out.cast("B")[:] = part
        return fetched

    def put(self, objects: Sequence[NewObject]) -> PutReport:
        check_names(new.name for new in objects)
        own = [NewObject(new.name, (memoryview(b"".join(new.parts)),)) for new in objects]
        return self.around(Operation.PUT, 0, partial(self.inner.put, own))

    def delete(self, names: Sequence[str]) -> None:
        check_names(names)
        super().delete(names)

    def list_page(self, prefix: str, *, cursor: str | None = None, limit: int = 1000) -> Page:
        check_prefix(prefix)
        return super().list_page(prefix, cursor=cursor, limit=limit)

    def close(self) -> None:
        """Closes without waiting for calls that do not come back. Idempotent."""
        self.inner.close()
        self._crew.close()
