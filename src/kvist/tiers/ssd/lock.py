"""One process owns a tier's directory: an exclusive flock on its `LOCK` file."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvist.core.errors import TierBusyError
from kvist.tiers.ssd.io import tier_error
from kvist.tiers.ssd.recovery import LOCK_NAME

LOCK_BYTES = 4096  # what the LOCK file takes, for the byte cap
_PID_BYTES = 32


class DirectoryLock:
    """Holds the directory from construction until `release`; the system frees it on death."""

    def __init__(self, directory: Path) -> None:
        """Creates the directory (mode 0700) and takes its lock.

        Raises:
            TierBusyError: another tier, here or in another process, holds it.
            TierError: the directory cannot be created or locked.
        """
        path = directory / LOCK_NAME
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o600)
        except OSError as exc:
            raise tier_error(exc, f"open {path}") from exc
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as exc:
            pid = os.pread(self._fd, _PID_BYTES, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise TierBusyError(
                exc.errno, f"{directory} is in use by process {pid or 'unknown'}"
            ) from exc
        except OSError as exc:
            os.close(self._fd)
            raise tier_error(exc, f"lock {path}") from exc

    def release(self) -> None:
        """Gives the directory back. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
