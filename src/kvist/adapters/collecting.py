"""Keeping a shared folder under its byte cap, with several hosts that collect.

Theory of operation. A collector walks the folder, and if it is over the cap removes the files whose
modification time is oldest until seven eighths are left. Which files may go is decided by each
file's own lease alone (`files.py`): a file is moved aside, looked at once more, and put back if a
reader has renewed its lease in between. So two collectors at once are safe, and the lock only saves
them the walk: it holds its owner's token, its owner renews its modification time, and one that was
not renewed for `LOCK_LEASE_S` is moved aside by whoever sees it, and put back if it turns out to be
another owner's by then.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from kvist.adapters.protocol import Listed
from kvist.core.errors import TierFullError

LOCK_LEASE_S = 60.0
_ORPHAN_S = 3600.0  # a temporary file so old was left by a crash
_ROOM_SHARES = 8  # collecting goes down to 7/8 of the cap
_LOOK_SHARES = 64  # a writer looks at the folder when it wrote this part of the cap
_RENEW_EVERY = 256  # files

Walk = Callable[[], Iterable[tuple[str, list[Listed]]]]


class CollectLock:
    """The lock file of one folder, for one owner."""

    def __init__(self, path: Path, tmp: Path, now_s: Callable[[], float]) -> None:
        self._path = path
        self._tmp = tmp
        self._now_s = now_s
        self._token = secrets.token_hex(16).encode()

    def take(self) -> bool:
        """Whether the lock is ours now; never waits."""
        if self._make():
            return True
        seen = self._owner()
        if seen is None or not self._is_stale():
            return seen is None and self._make()
        return self._move_aside(seen) and self._make()

    def renew(self) -> bool:
        """Renews the lease; whether the lock is still ours."""
        if self._owner() != self._token:
            return False
        with suppress(FileNotFoundError):
            os.utime(self._path)
        return True

    def release(self) -> None:
        """Gives the lock back, if it is still ours."""
        if self._owner() == self._token:
            self._path.unlink(missing_ok=True)

    def _make(self) -> bool:
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return False
        try:
            os.write(fd, self._token)
        finally:
            os.close(fd)
        return True

    def _owner(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None

    def _is_stale(self) -> bool:
        try:
            return self._now_s() - self._path.stat().st_mtime > LOCK_LEASE_S
        except FileNotFoundError:
            return False

    def _move_aside(self, seen: bytes) -> bool:
        """Takes a stale lock away; whether it was the one that was seen."""
        aside = self._tmp / f"lock-{secrets.token_hex(8)}"
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return False
        try:
            if aside.read_bytes() == seen:
                return True
            with suppress(FileExistsError):  # somebody's fresh lock: back to its place
                os.link(aside, self._path)
            return False
        finally:
            aside.unlink(missing_ok=True)


class Collector:
    """One process's part in keeping a folder under its cap. One caller at a time."""

    def __init__(
        self,
        root: Path,
        *,
        capacity_bytes: int,
        grace_s: float,
        files: Walk,
        path_of: Callable[[str], Path],
        now_s: Callable[[], float],
    ) -> None:
        self._tmp = root / "tmp"
        self._capacity_bytes = capacity_bytes
        self._grace_s = grace_s
        self._walk = files
        self._path_of = path_of
        self._now_s = now_s
        self._lock = CollectLock(root / "collect.lock", self._tmp, now_s)
        self._used_bytes: int | None = None  # when last looked at, plus what we wrote since
        self._since_bytes = 0

    def wrote(self, size_bytes: int) -> None:
        """Counts what this process has stored."""
        self._used_bytes = (self._used_bytes or 0) + size_bytes
        self._since_bytes += size_bytes

    def make_room(self, need_bytes: int, *, largest: int) -> tuple[str, ...]:
        """Collects if what is to be written may not fit; returns the names that went.

        Raises:
            TierFullError: an object is larger than the cap, or all that is there is in use.
            OSError: the folder cannot be walked.
        """
        if largest > self._capacity_bytes:
            raise TierFullError(
                errno.ENOSPC, f"{largest} bytes exceed the cap of {self._capacity_bytes}"
            )
        known = self._used_bytes
        if (
            known is not None
            and known + need_bytes <= self._capacity_bytes
            and self._since_bytes + need_bytes <= self._capacity_bytes // _LOOK_SHARES
        ):
            return ()
        if not self._lock.take():
            return ()  # somebody is at it
        try:
            evicted, used = self._collect(need_bytes)
        finally:
            self._lock.release()
        self._used_bytes, self._since_bytes = used, 0
        if used + need_bytes > self._capacity_bytes:
            raise TierFullError(errno.ENOSPC, f"{used} bytes are in use or were just written")
        return tuple(evicted)

    def _collect(self, need_bytes: int) -> tuple[list[str], int]:
        """Returns the names that went, and the bytes that are left."""
        evicted: list[str] = []
        found = sorted(
            (entry for _, entries in self._walk() for entry in entries),
            key=lambda e: e.modified_s or 0.0,
        )
        used = sum(entry.size_bytes or 0 for entry in found)
        now_s = self._now_s()
        self._remove_orphans(now_s)
        if used + need_bytes > self._capacity_bytes:
            target = self._capacity_bytes - self._capacity_bytes // _ROOM_SHARES
            for n, entry in enumerate(found):
                if used + need_bytes <= max(target, need_bytes):
                    break
                if 0 < self._grace_s > now_s - (entry.modified_s or 0.0):
                    break  # and so is every later one
                if n % _RENEW_EVERY == _RENEW_EVERY - 1 and not self._lock.renew():
                    break
                if self._remove(entry):
                    used -= entry.size_bytes or 0
                    evicted.append(entry.name)
        return evicted, used

    def _remove(self, entry: Listed) -> bool:
        """Removes a file unless its lease was renewed since it was seen."""
        path = self._path_of(entry.name)
        aside = self._tmp / f"gone-{secrets.token_hex(8)}"
        try:
            path.rename(aside)
        except FileNotFoundError:
            return True
        try:
            if not self._grace_s or aside.stat().st_mtime == entry.modified_s:
                return True
            with suppress(FileExistsError):
                os.link(aside, path)
            return False
        finally:
            aside.unlink(missing_ok=True)

    def _remove_orphans(self, now_s: float) -> None:
        for path in self._tmp.iterdir():
            with suppress(FileNotFoundError):
                if now_s - path.stat().st_ctime > _ORPHAN_S:
                    path.unlink()
