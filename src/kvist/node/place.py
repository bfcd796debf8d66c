"""Where a node lives: its socket, in a folder that only its user can enter, and its lock."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path

from kvist.core.errors import ConfigError, NodeRunningError

_MOST_PATH_BYTES = 107  # of a Unix socket
_BACKLOG = 64
_LOOK_S = 0.05
_PID_BYTES = 32
_RUNTIME = "XDG_RUNTIME_DIR"
_CREDENTIALS = struct.Struct("3i")


def peer_uid(connection: socket.socket) -> int:
    """The user on the other side of a Unix socket; of a listener, the one who made it listen."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(raw)[1]
    return uid


def default_socket() -> Path:
    """`kvist/node.sock` in the user's runtime folder, or a folder of the user's own in /tmp."""
    runtime = os.environ.get(_RUNTIME, "")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "kvist" / "node.sock"
    return Path(f"/tmp/kvist-{os.getuid()}") / "node.sock"


def engine_endpoints(port: int) -> tuple[str, str]:
    """Where an engine of this user that serves at `port` publishes KV events, and replays them.

    Files in a folder that others cannot enter, beside `default_socket`.
    """
    start = f"ipc://{default_socket().parent}/engines/{port}"
    return f"{start}.events", f"{start}.replay"


def make_private(folder: Path) -> None:
    """Makes a folder, and those above it that are missing, with mode 0700."""
    for one in (*reversed(folder.parents), folder):  # `mkdir` gives its mode to the last one only
        if not one.is_dir():
            one.mkdir(mode=0o700, exist_ok=True)


class Place:
    """The files of one node."""

    def __init__(self, path: Path) -> None:
        """`path` is the socket's."""
        self.socket = path
        self.lock = path.with_name(path.name + ".lock")
        self.log = path.with_name(path.name + ".log")
        self.config = path.with_name(path.name + ".yaml")
        self.incarnation = path.with_name(path.name + ".incarnation")

    def make_folder(self) -> None:
        """Makes the folder with mode 0700, or checks that it is like that.

        Raises:
            ConfigError: the folder is open to others, or the path does not fit in an address.
        """
        if len(os.fsencode(self.socket)) > _MOST_PATH_BYTES:
            raise ConfigError(
                f"{self.socket} is longer than the {_MOST_PATH_BYTES} bytes that a socket may have",
                path="$.node.socket",
                remedy="choose a shorter path",
            )
        folder = self.socket.parent
        make_private(folder)
        found = folder.stat()
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(
                f"{folder} is open to other users",
                path="$.node.socket",
                remedy="choose a folder of yours with mode 0700, or one that does not exist yet",
            )

    def listen(self) -> socket.socket:
        """A listening socket with mode 0600; the caller holds the lock, so an old one is stale."""
        self.socket.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listener.bind(os.fspath(self.socket))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        finally:
            os.umask(before)
        return listener


class NodeLock:
    """One node a socket: an exclusive flock, which the system frees on death."""

    def __init__(
        self, place: Place, *, wait_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Takes the lock, waiting for its holder to end for at most `wait_s`.

        Raises:
            NodeRunningError: a node holds it.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(place.lock, flags, 0o600)
        until = clock() + wait_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock() < until:
                    time.sleep(_LOOK_S)
                    continue
                pid = os.pread(self._fd, _PID_BYTES, 0).decode(errors="replace").strip()
                os.close(self._fd)
                raise NodeRunningError(
                    f"a node serves {place.socket} already (process {pid or 'unknown'})"
                ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Lets another node begin. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
