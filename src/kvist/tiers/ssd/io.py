"""System calls of the segment log, behind a Protocol, with every failure mapped to `TierError`."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Protocol

from kvist.core.errors import TierError, TierFullError, TierTimeout

LOCK_TIMEOUT_S = 60.0
IOV_MAX = 1024  # buffers that one call takes

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
SECTOR_BYTES = 512  # the unit of st_blocks on every Linux file system


class FsyncMode(Enum):
    """When written frames are forced to the medium."""

    BATCH = "batch"  # once a put, before its blocks become visible
    OFF = "off"  # never: survives a crash of the process, not of the machine


class IoMode(Enum):
    """Whether payloads go past the page cache."""

    AUTO = "auto"  # DIRECT
    DIRECT = "direct"  # O_DIRECT, and buffered where the file system refuses it
    BUFFERED = "buffered"


class SegmentIo(Protocol):
    """The calls that can fail; tests pass one that does. All raise `OSError`."""

    def open(self, path: Path, flags: int) -> int: ...
    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...
    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...
    def sync(self, fd: int) -> None: ...
    def unlink(self, path: Path) -> None: ...


class PosixIo:
    """Buffered I/O of the operating system."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def unlink(self, path: Path) -> None:
        path.unlink()


def tier_error(exc: OSError, doing: str) -> TierError:
    """`exc` as the `TierError` that callers expect, keeping its errno."""
    kind = TierFullError if exc.errno in _FULL else TierError
    return kind(exc.errno, f"{doing}: {exc.strerror or exc}")


@contextmanager
def held(lock: threading.Lock) -> Iterator[None]:
    """Holds `lock`, waiting at most `LOCK_TIMEOUT_S`.

    Raises:
        TierTimeout: another thread held it all that time.
    """
    if not lock.acquire(timeout=LOCK_TIMEOUT_S):
        raise TierTimeout(errno.ETIMEDOUT, f"a lock was not free within {LOCK_TIMEOUT_S:.0f} s")
    try:
        yield
    finally:
        lock.release()


def after(buffers: Sequence[memoryview], done_bytes: int) -> list[memoryview]:
    """What is left of `buffers` after their first `done_bytes`."""
    left = []
    for buffer in buffers:
        if done_bytes < len(buffer):
            left.append(buffer[done_bytes:])
        done_bytes = max(0, done_bytes - len(buffer))
    return left


def _fallocate(fd: int, offset: int, size_bytes: int) -> None:
    """Gives a file blocks beyond its end; where that fails they come with the writes."""
    call = getattr(_LIBC, "fallocate", None)
    if call is not None:
        call(fd, _KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(size_bytes))


_Move = Callable[[int, Sequence[memoryview], int], int]
_LIBC = ctypes.CDLL(None)


class SegmentFile:
    """One open segment file. Reads pin it, so that closing waits for those that are under way.

    A file is buffered until `go_direct`. A call that O_DIRECT does not allow (EINVAL: a buffer or
    a size that is not in whole pages) makes the file buffered again and is then done.
    """

    def __init__(self, io: SegmentIo, path: Path, flags: int) -> None:
        """Opens `path`.

        Raises:
            TierError: the file cannot be opened.
        """
        self.path = path
        self._io = io
        self._lock = threading.Lock()
        self._pins = 0
        self._closing = False
        self._direct = False
        try:
            self._fd = io.open(path, flags | os.O_NOFOLLOW)
        except OSError as exc:
            raise tier_error(exc, f"open {path}") from exc

    @property
    def fd(self) -> int:
        """The descriptor, for an engine; valid while pinned."""
        return self._fd

    @property
    def is_direct(self) -> bool:
        """Whether calls go past the page cache now."""
        return self._direct

    def go_direct(self) -> bool:
        """Sets O_DIRECT; returns whether the file system allows it."""
        self._direct = self._set_direct(on=True)
        return self._direct

    def go_buffered(self) -> None:
        """Clears O_DIRECT."""
        self._direct = False
        self._set_direct(on=False)

    def _set_direct(self, *, on: bool) -> bool:
        try:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | (os.O_DIRECT if on else 0))
        except OSError:
            return False
        return True

    def reserve(self, size_bytes: int) -> None:
        """Asks the file system for the blocks of the first `size_bytes`; the length stays."""
        _fallocate(self._fd, 0, size_bytes)

    @contextmanager
    def pinned(self) -> Iterator[bool]:
        """Keeps the file open meanwhile; yields whether it still was open."""
        with held(self._lock):
            alive = not self._closing
            self._pins += alive
        try:
            yield alive
        finally:
            with held(self._lock):
                self._pins -= alive
                self._close_when_unused()

    def close(self) -> None:
        """Closes now, or when the last read that is under way ends. Idempotent."""
        with held(self._lock):
            self._closing = True
            self._close_when_unused()

    def _close_when_unused(self) -> None:
        if self._closing and not self._pins and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def write_at(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Writes all of `buffers`, however often the system writes less.

        Raises:
            TierFullError: ENOSPC or EDQUOT. Part may have been written.
            TierError: any other failure. Part may have been written.
        """
        try:
            while buffers:
                done = self._call(self._io.pwritev, buffers, offset)
                if done <= 0:
                    raise OSError(errno.EIO, "the system wrote nothing")
                buffers, offset = after(buffers, done), offset + done
        except OSError as exc:
            raise tier_error(exc, f"write {self.path}") from exc

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fills `buffers`; the number of bytes read is less than their size only at the end.

        Raises:
            TierError: the medium failed.
        """
        total = 0
        try:
            while buffers:
                done = self._call(self._io.preadv, buffers, offset + total)
                if done <= 0:
                    break
                buffers, total = after(buffers, done), total + done
        except OSError as exc:
            raise tier_error(exc, f"read {self.path}") from exc
        return total

    def _call(self, move: _Move, buffers: Sequence[memoryview], offset: int) -> int:
        """One call with at most as many buffers as the system takes."""
        buffers = buffers[:IOV_MAX]
        try:
            return move(self._fd, buffers, offset)
        except OSError as exc:
            if exc.errno != errno.EINVAL or not self._direct:
                raise
        self.go_buffered()
        return move(self._fd, buffers, offset)

    def sync(self) -> None:
        """Forces what was written to the medium.

        Raises:
            TierError: the medium failed, or the file was deleted behind our back.
        """
        try:
            self._io.sync(self._fd)
        except OSError as exc:
            raise tier_error(exc, f"fdatasync {self.path}") from exc

    def truncate(self, size_bytes: int) -> None:
        """Cuts the file.

        Raises:
            TierError: the medium failed.
        """
        try:
            os.ftruncate(self._fd, size_bytes)
        except OSError as exc:
            raise tier_error(exc, f"truncate {self.path}") from exc

    def _stat(self) -> os.stat_result:
        try:
            return os.fstat(self._fd)
        except OSError as exc:
            raise tier_error(exc, f"stat {self.path}") from exc

    def size_bytes(self) -> int:
        """Length of the file.

        Raises:
            TierError: the medium failed.
        """
        return self._stat().st_size

    def disk_bytes(self) -> int:
        """What the file takes: its length or its allocated sectors, whichever is more.

        Raises:
            TierError: the file was deleted behind our back, or the medium failed.
        """
        found = self._stat()
        if found.st_nlink == 0:
            raise TierError(errno.ENOENT, f"{self.path} was deleted by someone else")
        return max(found.st_size, found.st_blocks * SECTOR_BYTES)


def sync_directory(io: SegmentIo, directory: Path) -> None:
    """Makes the creation of files in `directory` durable.

    Raises:
        TierError: the directory is gone or the medium failed.
    """
    try:
        fd = io.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            io.sync(fd)
        finally:
            os.close(fd)
    except OSError as exc:
        raise tier_error(exc, f"fdatasync {directory}") from exc
