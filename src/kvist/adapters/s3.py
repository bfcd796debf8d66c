"""Objects of an S3 bucket, or of anything that speaks its protocol (extra `s3`, by obstore).

An object is put whole, with `If-None-Match: *`, so that the first writer wins on a server that
knows it (AWS, MinIO and Ceph do). Credentials and region come from where AWS's tools look for
them, the environment first. With a capacity, the objects that were written first go when a look at
the bucket shows more; without one, a lifecycle rule of the bucket is the way.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError
from obstore.store import S3Store

from kvist.adapters.crew import Crew
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
from kvist.core.errors import TierError, TierFullError, TierTimeout

_T = TypeVar("_T")
_R = TypeVar("_R")
_LOOK_SHARES = 64
_ROOM_SHARES = 8
_LOOK_S = 5.0
_TIMEOUT_WORDS = ("timed out", "timedout", "timeout")


class S3Adapter:
    """A `StorageAdapter` over the objects of a bucket below a prefix."""

    def __init__(
        self,
        bucket: str,
        *,
        prefix: str = "",
        endpoint: str | None = None,
        region: str | None = None,
        capacity_bytes: int | None = None,
        timeout_s: float = 2.0,
        connections: int = 4,
    ) -> None:
        """Connects to nothing yet.

        Args:
            bucket: exists already.
            prefix: what every object's name in the bucket begins with.
            endpoint: of another server than AWS's; plain HTTP only if it says `http://`.
            region: where the environment names none.
            capacity_bytes: what the objects may take together, between two looks at the bucket a
                64th more.
            timeout_s: of a request, from connecting to the last byte.
            connections: requests that may be under way at once, in each call.

        Raises:
            ValueError: the options cannot be used.
        """
        options: dict[str, Any] = {"client_options": _client_options(timeout_s, endpoint)}
        options |= {"endpoint": endpoint} if endpoint else {}
        options |= {"region": region} if region else {}
        try:
            self._store = S3Store(
                bucket, prefix=prefix or None, retry_config={"max_retries": 0}, **options
            )
        except BaseError as error:
            raise ValueError(f"S3: {error}") from error
        self._capacity_bytes = capacity_bytes
        self._crew = Crew(2 * connections, name="kvist-s3")
        self._state = OpenState(f"bucket {bucket}")
        self._lock = Lock()
        self._used_bytes: int | None = None
        self._since_bytes = 0
        self._order: dict[str, int] = {}  # of our own writes, within a second of the server's

    def get(self, wanted: Sequence[Wanted]) -> list[Fetched]:
        self._state.demand()
        check_names(w.name for w in wanted)
        return self._each(self._get_one, wanted)

    def put(self, objects: Sequence[NewObject]) -> PutReport:
        self._state.demand()
        check_names(o.name for o in objects)
        evicted = self._make_room(objects)
        distinct = {o.name: o for o in reversed(objects)}
        outcomes = dict(
            zip(distinct, self._each(self._put_one, list(distinct.values())), strict=True)
        )
        self._count([o for o in distinct.values() if outcomes[o.name] is Put.STORED])
        return PutReport(tuple(outcomes.pop(o.name, Put.PRESENT) for o in objects), evicted)

    def delete(self, names: Sequence[str]) -> None:
        self._state.demand()
        check_names(names)
        self._each(self._delete_one, names)

    def list_page(self, prefix: str, *, cursor: str | None = None, limit: int = 1000) -> Page:
        self._state.demand()
        check_prefix(prefix)
        folder = prefix.rpartition("/")[0] or None
        with _mapping("list"):
            stream = obstore.list(self._store, folder, offset=cursor, chunk_size=limit)
            found = next(iter(stream), [])
        entries = tuple(
            Listed(about["path"], about["size"], about["last_modified"].timestamp())
            for about in found
            if about["path"].startswith(prefix)
        )
        return Page(entries, found[-1]["path"] if len(found) >= limit else None)

    def close(self) -> None:
        self._state.closed = True
        self._crew.close()

    def _get_one(self, wanted: Wanted) -> Fetched:
        with _mapping("get"):
            try:
                if not wanted.into:
                    return Fetched(Got.HIT, obstore.head(self._store, wanted.name)["size"])
                result = obstore.get(self._store, wanted.name)
                size_bytes = result.meta["size"]
                if size_bytes != wanted.size_bytes:
                    return Fetched(Got.SIZE, size_bytes)
                return answer(memoryview(result.bytes()), wanted)
            except (NotFoundError, FileNotFoundError):
                return Fetched(Got.ABSENT)

    def _put_one(self, new: NewObject) -> Put:
        with _mapping("put"):
            try:
                data = b"".join(new.parts)
                obstore.put(self._store, new.name, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return Put.PRESENT
        return Put.STORED

    def _delete_one(self, name: str) -> None:
        with _mapping("delete"):
            try:
                obstore.delete(self._store, name)
            except (NotFoundError, FileNotFoundError):
                return

    def _each(self, call: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
        """Makes the call for every item, several at once; ends when all have ended."""
        if len(items) == 1:
            return [call(items[0])]
        futures: list[Future[_R]] = []
        try:
            for item in items:
                futures.append(self._crew.submit(partial(call, item)))
        finally:
            left = set(futures)
            while left:  # each ends at its request's timeout
                _, left = wait(left, timeout=_LOOK_S)
        return [future.result(timeout=0) for future in futures]

    def _count(self, stored: Sequence[NewObject]) -> None:
        if self._capacity_bytes is None:
            return
        with self._lock:
            for new in stored:
                self._order[new.name] = len(self._order)
                self._since_bytes += new.size_bytes
                self._used_bytes = (self._used_bytes or 0) + new.size_bytes

    def _make_room(self, objects: Sequence[NewObject]) -> tuple[str, ...]:
        cap = self._capacity_bytes
        if cap is None or not objects:
            return ()
        need = sum(o.size_bytes for o in objects)
        if any(o.size_bytes > cap for o in objects):
            raise TierFullError(errno.ENOSPC, f"an object exceeds the cap of {cap} bytes")
        with self._lock:
            known = self._used_bytes
            fits = known is not None and known + need <= cap
            if fits and self._since_bytes + need <= cap // _LOOK_SHARES:
                return ()
        victims, used = self._victims(need, cap)
        self._each(self._delete_one, victims)
        with self._lock:
            self._used_bytes, self._since_bytes = used, 0
            for name in victims:
                self._order.pop(name, None)
        return tuple(victims)

    def _victims(self, need: int, cap: int) -> tuple[list[str], int]:
        """What must go, oldest first, and the bytes that are left then."""
        found: list[Listed] = []
        cursor: str | None = None
        while True:
            page = self.list_page("", cursor=cursor)
            found += page.entries
            cursor = page.cursor
            if cursor is None:
                break
        used = sum(entry.size_bytes or 0 for entry in found)
        victims: list[str] = []
        if used + need <= cap:
            return victims, used
        found.sort(key=lambda e: (int(e.modified_s or 0), self._order.get(e.name, -1)))
        for entry in found:
            if used + need <= max(need, cap - cap // _ROOM_SHARES):
                break
            victims.append(entry.name)
            used -= entry.size_bytes or 0
        return victims, used


def _client_options(timeout_s: float, endpoint: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "timeout": f"{int(timeout_s * 1000)}ms",
        "connect_timeout": f"{int(timeout_s * 1000)}ms",
    }
    if endpoint is not None and endpoint.startswith("http://"):
        options["allow_http"] = True
    return options


@contextmanager
def _mapping(doing: str) -> Iterator[None]:
    """Maps what obstore raises."""
    try:
        yield
    except (NotFoundError, FileNotFoundError) as error:
        raise TierError(errno.ENOENT, f"S3 {doing}: {_line(error)}") from error
    except BaseError as error:
        text = str(error).lower()
        late = any(word in text for word in _TIMEOUT_WORDS)
        kind, code = (TierTimeout, errno.ETIMEDOUT) if late else (TierError, errno.EIO)
        raise kind(code, f"S3 {doing}: {_line(error)}") from error


def _line(error: Exception) -> str:
    """The first line of an error; others hold debugging."""
    return str(error).strip().partition("\n")[0][:300]
