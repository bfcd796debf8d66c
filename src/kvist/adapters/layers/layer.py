"""What layers have in common: every call goes through `around`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import TypeVar

from kvist.adapters.protocol import Fetched, NewObject, Page, PutReport, StorageAdapter, Wanted

_T = TypeVar("_T")


class Operation(Enum):
    """What an adapter is asked to do."""

    GET = "get"
    PUT = "put"
    DELETE = "delete"
    LIST = "list"


class Layer:
    """Passes every call on. A layer overrides `around`, or the calls that it changes.

    All operations may be repeated: objects never change, the first writer wins, and deleting what
    is gone is no fault.
    """

    def __init__(self, inner: StorageAdapter) -> None:
        """Owns `inner`."""
        self.inner = inner

    def around(self, operation: Operation, size_bytes: int, call: Callable[[], _T]) -> _T:
        """Makes one call, which moves up to `size_bytes` of objects."""
        return call()

    def get(self, wanted: Sequence[Wanted]) -> list[Fetched]:
        size_bytes = sum(w.size_bytes for w in wanted)
        return self.around(Operation.GET, size_bytes, partial(self.inner.get, wanted))

    def put(self, objects: Sequence[NewObject]) -> PutReport:
        size_bytes = sum(o.size_bytes for o in objects)
        return self.around(Operation.PUT, size_bytes, partial(self.inner.put, objects))

    def delete(self, names: Sequence[str]) -> None:
        return self.around(Operation.DELETE, 0, partial(self.inner.delete, names))

    def list_page(self, prefix: str, *, cursor: str | None = None, limit: int = 1000) -> Page:
        call = partial(self.inner.list_page, prefix, cursor=cursor, limit=limit)
        return self.around(Operation.LIST, 0, call)

    def close(self) -> None:
        self.inner.close()
