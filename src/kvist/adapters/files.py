"""Objects as files on a mount that several hosts share: NFS, Lustre, CephFS, a local folder.

    ROOT/format                        `kvist-files 1`
    ROOT/objects/DIRS/=X/=YZ/BASE      the object `DIRS/BASE`; X and YZ begin its BASE
    ROOT/tmp/TOKEN-N                   a write under way
    ROOT/collect.lock                  who collects (`collecting.py`)

An object is written to a temporary file, synced, and then linked to its name: whoever links first
wins, and a crash leaves a temporary file, never half an object. Where the mount has no hard links
the file is renamed, and a race's later winner replaces the same bytes by the same bytes.

A file's modification time is a lease on it: a reader renews it before it reads, when half of
`grace_s` is over, and a collector never removes a file whose lease has not ended. All times are the
file server's, since the hosts' clocks differ.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvist.adapters.collecting import Collector
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
    check_names,
    check_prefix,
)
from kvist.core.errors import TierError, TierFullError, TierTimeout, VersionError

DEFAULT_GRACE_S = 600.0
_FORMAT = b"kvist-files 1\n"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_GONE = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_FILL = "_"  # stands in for the characters that a short name lacks
_IOV_MAX = 1024
_LOCK_TIMEOUT_S = 60.0


class FilesAdapter:
    """A `StorageAdapter` over a folder. Any number of processes on any hosts may share it.

    A call lasts as long as the mount takes; `layers.timeout` bounds it.
    """

    def __init__(
        self,
        root: Path,
        *,
        capacity_bytes: int | None = None,
        grace_s: float = DEFAULT_GRACE_S,
    ) -> None:
        """Makes the folder (mode 0700) if it is absent.

        Args:
            root: belongs to Kvist alone.
            capacity_bytes: what the objects may take together; writers of one folder should agree.
                Between two looks at the folder each may exceed it by a 64th part.
            grace_s: seconds for which what was written or read is safe from collection.

        Raises:
            TierError: the folder cannot be used.
            VersionError: it was laid out by a newer Kvist.
        """
        self._objects = root / "objects"
        self._tmp = root / "tmp"
        self._grace_s = grace_s
        self._state = OpenState(f"files in {root}")
        self._token = secrets.token_hex(8)
        self._numbers = itertools.count()
        try:
            for folder in (root, self._objects, self._tmp):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._agree_on_format(root / "format")
            self._ahead_s = self._server_now_s() - time.time()
        except OSError as exc:
            raise _mapped(exc, f"open {root}") from exc
        self._collector = (
            None
            if capacity_bytes is None
            else Collector(
                root,
                capacity_bytes=capacity_bytes,
                grace_s=grace_s,
                files=self._walk,
                path_of=self._path,
                now_s=self._server_now_s,
            )
        )
        self._room_lock = threading.Lock()

    def get(self, wanted: Sequence[Wanted]) -> list[Fetched]:
        self._state.demand()
        check_names(w.name for w in wanted)
        return [self._get_one(w) for w in wanted]

    def put(self, objects: Sequence[NewObject]) -> PutReport:
        self._state.demand()
        check_names(o.name for o in objects)
        evicted = self._make_room(objects)
        outcomes = []
        folders: set[Path] = set()
        for new in objects:
            path = self._path(new.name)
            try:
                outcome = Put.PRESENT if path.exists() else self._write(new, path)
            except OSError as exc:
                raise _mapped(exc, f"write {path}") from exc
            if outcome is Put.STORED:
                folders.add(path.parent)
                if self._collector is not None:
                    self._collector.wrote(new.size_bytes)
            outcomes.append(outcome)
        for folder in folders:
            _sync_folder(folder)
        return PutReport(tuple(outcomes), evicted)

    def delete(self, names: Sequence[str]) -> None:
        self._state.demand()
        check_names(names)
        for name in names:
            path = self._path(name)
            try:
                path.unlink(missing_ok=True)
            except OSError as exc:
                if exc.errno not in _GONE:
                    raise _mapped(exc, f"delete {path}") from exc

    def list_page(self, prefix: str, *, cursor: str | None = None, limit: int = 1000) -> Page:
        self._state.demand()
        check_prefix(prefix)
        found: list[Listed] = []
        try:
            for folder, listed in self._walk(prefix, after=cursor or ""):
                found += listed
                if len(found) >= limit:
                    return Page(tuple(found), folder)
        except OSError as exc:
            raise _mapped(exc, f"list {self._objects}") from exc
        return Page(tuple(found))

    def close(self) -> None:
        self._state.closed = True

    def _get_one(self, wanted: Wanted) -> Fetched:
        path = self._path(wanted.name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as exc:
            if exc.errno in _GONE:
                return Fetched(Got.ABSENT)
            raise _mapped(exc, f"open {path}") from exc
        try:
            about = os.fstat(fd)
            self._renew(fd, about.st_mtime)
            if not wanted.into:
                return Fetched(Got.HIT, about.st_size)
            if about.st_size != wanted.size_bytes:
                return Fetched(Got.SIZE, about.st_size)
            got_bytes = _read(fd, wanted.into)
            return Fetched(Got.HIT if got_bytes == about.st_size else Got.SIZE, got_bytes)
        except OSError as exc:
            if exc.errno in _GONE:
                return Fetched(Got.ABSENT)
            raise _mapped(exc, f"read {path}") from exc
        finally:
            os.close(fd)

    def _renew(self, fd: int, modified_s: float) -> None:
        """Keeps a file that is about to be read from collectors."""
        if 0 < self._grace_s / 2 < time.time() + self._ahead_s - modified_s:
            with suppress(PermissionError):  # a read-only mount: its lease stays as it is
                os.utime(fd)

    def _write(self, new: NewObject, path: Path) -> Put:
        temporary = self._tmp / f"{self._token}-{next(self._numbers)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(temporary, flags, 0o600)
            try:
                _write_all(fd, new.parts)
                os.fsync(fd)
            finally:
                os.close(fd)
            return _publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _make_room(self, objects: Sequence[NewObject]) -> tuple[str, ...]:
        if self._collector is None or not objects:
            return ()
        need = sum(new.size_bytes for new in objects)
        if not self._room_lock.acquire(timeout=_LOCK_TIMEOUT_S):
            raise TierTimeout(errno.ETIMEDOUT, "another thread is collecting")
        try:
            return self._collector.make_room(need, largest=max(o.size_bytes for o in objects))
        except OSError as exc:
            raise _mapped(exc, f"collect {self._objects}") from exc
        finally:
            self._room_lock.release()

    def _path(self, name: str) -> Path:
        folders, _, base = name.rpartition("/")
        fan = base.ljust(3, _FILL)
        return self._objects / folders / f"={fan[:1]}" / f"={fan[1:3]}" / base

    def _walk(self, prefix: str = "", *, after: str = "") -> Iterator[tuple[str, list[Listed]]]:
        """Folders with objects in them, in order, from the first after `after`."""
        top = self._objects / prefix.rpartition("/")[0]
        for folder in _leaves(str(top), str(self._objects), after):
            relative = folder[len(str(self._objects)) + 1 :]
            names = relative.rsplit("/", 2)[0] + "/" if relative.count("/") > 1 else ""
            listed = [
                Listed(names + entry.name, about.st_size, about.st_mtime)
                for entry in _entries(folder)
                if (names + entry.name).startswith(prefix) and (about := _stat(entry)) is not None
            ]
            yield relative, listed

    def _server_now_s(self) -> float:
        probe = self._tmp / f"{self._token}-{next(self._numbers)}"
        try:
            probe.touch(0o600)
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _agree_on_format(self, path: Path) -> None:
        if not path.exists():
            new = NewObject("format", (memoryview(_FORMAT),))
            self._write(new, path)
        found = path.read_bytes()
        if found != _FORMAT:
            raise VersionError(f"{path} says {found[:40]!r}; this Kvist reads {_FORMAT!r}")


def _publish(temporary: Path, path: Path) -> Put:
    """Gives a whole file its name, unless the name is taken."""
    for attempt in range(2):
        try:
            os.link(temporary, path)
            return Put.STORED
        except FileExistsError:
            # An answer that was lost on the way is asked for again: then the link is our own.
            return Put.STORED if temporary.stat().st_nlink > 1 else Put.PRESENT
        except FileNotFoundError:
            if attempt:
                raise
            _make_folder(path.parent)
        except OSError as exc:
            if exc.errno not in _NO_LINKS:
                raise
            _make_folder(path.parent)
            if path.exists():
                return Put.PRESENT
            temporary.rename(path)
            return Put.STORED
    raise AssertionError("unreachable")


def _make_folder(folder: Path) -> None:
    """Makes a folder and those above it, all of mode 0700."""
    if not folder.parent.is_dir():
        _make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def _write_all(fd: int, parts: Sequence[memoryview]) -> None:
    left = [part.cast("B") for part in parts if part.nbytes]
    while left:
        done = os.writev(fd, left[:_IOV_MAX])
        left = _after(left, done)


def _read(fd: int, into: Sequence[memoryview]) -> int:
    """Fills the buffers from the start of the file; returns how many bytes came."""
    left, at = [part.cast("B") for part in into if part.nbytes], 0
    while left:
        done = os.preadv(fd, left[:_IOV_MAX], at)
        if not done:
            break
        at += done
        left = _after(left, done)
    return at


def _after(buffers: Sequence[memoryview], done_bytes: int) -> list[memoryview]:
    left = []
    for buffer in buffers:
        if done_bytes < len(buffer):
            left.append(buffer[done_bytes:])
        done_bytes = max(0, done_bytes - len(buffer))
    return left


def _leaves(folder: str, top: str, after: str) -> Iterator[str]:
    """The folders named `=YZ` below `folder`, sorted, without those up to `after`."""
    for entry in sorted(_entries(folder), key=lambda e: e.name):
        relative = entry.path[len(top) + 1 :]
        # What sorts before the cursor was walked, unless the cursor lies inside it.
        if relative.split("/") < after.split("/")[: relative.count("/") + 1]:
            continue
        if not entry.is_dir(follow_symlinks=False):
            continue
        if entry.name.startswith("=") and len(entry.name) == 3:
            if relative != after:
                yield entry.path
        else:
            yield from _leaves(entry.path, top, after)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as exc:
        if exc.errno in _GONE:
            return []
        raise


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError as exc:
        if exc.errno in _GONE:
            return None
        raise


def _sync_folder(folder: Path) -> None:
    """Makes new names durable; a mount that cannot do so keeps them as it keeps any."""
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _mapped(exc: OSError, doing: str) -> TierError:
    if isinstance(exc, TierError):
        return exc
    kind = TierFullError if exc.errno in _FULL else TierError
    if exc.errno == errno.ETIMEDOUT:
        kind = TierTimeout
    return kind(exc.errno, f"{doing}: {exc.strerror or exc}")
