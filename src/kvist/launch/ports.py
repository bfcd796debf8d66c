"""Ports of engines, so that hosts which share a machine never choose the same one.

A server binds its port long after it was started, and some let two processes bind one port. So the
port is reserved by a lock on a file, which the system frees when its holder ends.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from kvist.core.errors import ConfigError
from kvist.node.place import make_private

_TRIED = 200
_MOST_PORT = 65_535


class Port:
    """The port of one engine: chosen anew at each start, kept while it is free."""

    def __init__(self, folder: Path, host: str, first: int) -> None:
        """Takes none yet.

        Args:
            folder: of the locks; the same for all hosts of a user on one machine.
            host: address to listen on.
            first: the port that is tried first.
        """
        self._folder, self._host, self._first = folder, host, first
        self._fd = -1
        self.number = 0

    def choose(self) -> int:
        """Reserves the port of before, if it is free, or the first that is.

        Raises:
            ConfigError: none of those that were tried is free.
        """
        if self._fd >= 0 and _is_free(self._host, self.number):
            return self.number
        self.release()
        make_private(self._folder)
        for number in range(self._first, min(self._first + _TRIED, _MOST_PORT + 1)):
            if self._reserve(number):
                return number
        raise ConfigError(
            f"no free port from {self._first} on",
            path="$.engines.port",
            remedy="choose another, or end what listens there",
        )

    def release(self) -> None:
        """Gives the port back. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self.number = -1, 0

    def _reserve(self, number: int) -> bool:
        fd = os.open(self._folder / f"{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        if not _is_free(self._host, number):
            os.close(fd)
            return False
        self._fd, self.number = fd, number
        return True


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
