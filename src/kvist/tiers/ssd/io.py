"""System calls of the segment log, behind a Protocol, with every failure mapped to `TierError`."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Protocol

from kvist.core.errors import TierError, TierFullError, TierTimeout

LOCK_TIMEOUT_S = 60.0

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_SECTOR_BYTES = 512  # the unit of st_blocks on every Linux file system


class FsyncMode(Enum):
    """When written frames are forced to the medium."""

    BATCH = "batch"  # once a put, before its blocks become visible
    OFF = "off"  # never: survives a crash of the process, not of the machine


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


def _after(buffers: Sequence[memoryview], done_bytes: int) -> list[memoryview]:
    """What is left of `buffers` after their first `done_bytes`."""
    left = []
    for buffer in buffers:
        if done_bytes < len(buffer):
            left.append(buffer[done_bytes:])
        done_bytes = max(0, done_bytes - len(buffer))
    return left


class SegmentFile:
    """One open segment file. Reads pin it, so that closing waits for those that are under way."""

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
        try:
            self._fd = io.open(path, flags | os.O_NOFOLLOW)
        except OSError as exc:
            raise tier_error(exc, f"open {path}") from exc

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
                done = self._io.pwritev(self._fd, buffers, offset)
                if done <= 0:
                    raise OSError(errno.EIO, "the system wrote nothing")
                buffers, offset = _after(buffers, done), offset + done
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
                done = self._io.preadv(self._fd, buffers, offset + total)
                if done <= 0:
                    break
                buffers, total = _after(buffers, done), total + done
        except OSError as exc:
            raise tier_error(exc, f"read {self.path}") from exc
        return total

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
        return max(found.st_size, found.st_blocks * _SECTOR_BYTES)


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
