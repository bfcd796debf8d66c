"""The node's process: takes the lock, serves, and drains when it is told to end.

Drain: the socket goes first, so that engines look for the next node; then nothing is granted any
more; then every store writes what is not on SSD yet and lets go of its folders; then the lock. The
next node, which may be waiting for the lock, adopts the SSD tier. The arena is new and empty.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType

from kvist.node.keyspaces import Keyspaces, OpenStore
from kvist.node.peers.peering import Peering
from kvist.node.peers.server import PeerServer
from kvist.node.place import NodeLock, Place
from kvist.node.server import NodeServer
from kvist.node.work import SlowWork

_log = logging.getLogger(__name__)
_PEERS_S = 2.0  # how long their connections may take to end
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(
    place: Place,
    open_store: OpenStore,
    *,
    keyspaces: int,
    drain_s: float,
    wait_s: float = 0.0,
    facts: Mapping[str, object] | None = None,
    peering: Peering | None = None,
    open_front: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Serves until a signal or a client's `drain`; may be called on the main thread only.

    Args:
        place: where.
        open_store: opens the store of a keyspace.
        keyspaces: stores that may be open at once.
        drain_s: how long the end may take.
        wait_s: how long to wait for another node on this socket to end.
        facts: what `status` says besides.
        peering: whether the stores are served to other nodes.
        open_front: called with the lock held; what it gives is entered while the node serves.

    Raises:
        ConfigError: the socket's folder is not this user's alone, or the front cannot be opened.
        NodeRunningError: another node serves this socket.
        OSError: the socket, or that for other nodes, cannot be made.
    """
    place.make_folder()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two a client, and those of the log
    _log.debug("%d open files in place of %d", hard, soft)
    lock = NodeLock(place, wait_s=wait_s)
    try:

        def make(work: SlowWork, poke: Callable[[], None]) -> Keyspaces:
            return Keyspaces(open_store, work, poke, most=keyspaces)

        described = {"socket": os.fspath(place.socket), **(facts or {})}
        peers: PeerServer | None = None

        def describe() -> dict[str, object]:
            return described if peers is None else described | {"peers": peers.facts()}

        front = open_front()
        server = NodeServer(place.listen(), make, describe=describe)
        if peering is not None:
            peers = peering.serve(server.keyspaces.in_use)
        _log.info("process %d serves %s", os.getpid(), place.socket)
        with _signals_to(server):
            with front:
                server.run()
            place.socket.unlink(missing_ok=True)
            if peers is not None:
                peers.stop(_PEERS_S)
            server.keyspaces.close(drain_s)
        _log.info("drained")
    finally:
        lock.release()


@contextmanager
def _signals_to(server: NodeServer) -> Iterator[None]:
    """While the body runs, the signals that ask a process to end make the node drain."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        server.stop(f"the node got {signal.Signals(number).name}")

    before = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
