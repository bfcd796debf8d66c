"""The node's process: takes the lock, serves, and drains when it is told to end.

Drain: the socket goes first, so that engines look for the next node; then nothing is granted any
more; then every store writes what is not on SSD yet and lets go of its folders; then the lock. The
next node, which may be waiting for the lock, adopts the SSD tier, and, if it has asked for it, the
arenas (`handover.py`). A node of a cluster says goodbye before its stores close, so that nobody
reads from it any more.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from kvist.node.estates import Estates
from kvist.node.handover import bequeath
from kvist.node.keyspaces import Keyspaces, OpenStore
from kvist.node.outward import Join, Lends, Outward
from kvist.node.peers.peering import Peering
from kvist.node.place import NodeLock, Place
from kvist.node.server import NodeServer
from kvist.node.work import SlowWork

if TYPE_CHECKING:  # it needs the extra `cluster`
    from kvist.node.cluster_node import ClusterNode

_log = logging.getLogger(__name__)
_HAND_S = 10.0  # for the names of blocks, not for their bytes
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(
    place: Place,
    open_stores: Callable[[Lends | None], OpenStore],
    *,
    keyspaces: int,
    drain_s: float,
    wait_s: float = 0.0,
    facts: Mapping[str, object] | None = None,
    peering: Peering | None = None,
    join: Join | None = None,
    hand_over_s: float = 0.0,
    last_s: float = 0.0,
    open_front: Callable[[], AbstractContextManager[None]] = nullcontext,
    estates: Estates | None = None,
) -> None:
    """Serves until a signal or a client's `drain`; may be called on the main thread only.

    Args:
        place: where.
        open_stores: gives what opens the store of a keyspace, from what lends it blocks.
        keyspaces: stores that may be open at once.
        drain_s: how long the end may take.
        wait_s: how long to wait for another node on this socket to end.
        facts: what `status` says besides.
        peering: what it has to do with other nodes.
        join: called with the lock held: makes it part of a cluster.
        hand_over_s: how long others may take to get what only it holds, if it is told so.
        last_s: the same for a node that gets a signal; 0: it hands over nothing.
        open_front: called with the lock held; what it gives is entered while the node serves.
        estates: what the node before this one left, of which `open_stores` takes what it needs.

    Raises:
        ConfigError: the socket's folder is not this user's alone, or the front or the cluster
            cannot be opened.
        NodeRunningError: another node serves this socket.
        TierError: the cluster's discovery cannot be used.
        OSError: the socket, or one for other nodes, cannot be made.
    """
    place.make_folder()
    _open_many_files()
    lock = NodeLock(place, wait_s=wait_s)
    try:
        front = open_front()
        with closing(Outward(peering, join)) as outward:
            cluster = outward.cluster
            open_store = open_stores(outward.lends)

            def make(work: SlowWork, poke: Callable[[], None]) -> Keyspaces:
                return Keyspaces(
                    open_store, work, poke, most=keyspaces, announcer=cluster, estates=estates
                )

            described = {"socket": os.fspath(place.socket), **(facts or {})}
            server = NodeServer(
                place.listen(),
                make,
                describe=lambda: described | outward.facts(),
                hand_over=None if cluster is None else partial(cluster.drain, hand_over_s),
            )
            outward.open(server.keyspaces)
            _log.info("process %d serves %s", os.getpid(), place.socket)
            with _signals_to(server, _leave(cluster, last_s)):
                with front:
                    server.run()
                place.socket.unlink(missing_ok=True)
                outward.close()
                _close_stores(server, drain_s)
        _log.info("drained")
    finally:
        lock.release()


def _open_many_files() -> None:
    """As many as the system allows: two a client, and those of the log."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _log.debug("%d open files in place of %d", hard, soft)


def _leave(
    cluster: ClusterNode | None, within_s: float
) -> Callable[[Callable[[], None]], None] | None:
    """What a signal begins with: it calls what it gets when others have what only this node has."""
    if cluster is None or within_s <= 0:
        return None
    return partial(cluster.drain, within_s, patient=False)


def _close_stores(server: NodeServer, drain_s: float) -> None:
    """Closes every store; the next node, if it waits for them, gets the arenas."""
    if server.heir is None:
        server.keyspaces.close(drain_s)
        return
    with server.heir:
        left = server.keyspaces.bequeath(server.lives.sessions, drain_s)
        blocks = sum(len(one.legacy.estate.blocks) for one in left)
        try:
            bequeath(server.heir, left, deadline_s=_HAND_S)
        except OSError as error:
            _log.warning("the next node does not take over what is in DRAM: %s", error)
        else:
            _log.info("the next node takes over %d blocks in DRAM", blocks)
    for one in left:
        one.close()
    server.lives.close()


@contextmanager
def _signals_to(
    server: NodeServer, leave: Callable[[Callable[[], None]], None] | None
) -> Iterator[None]:
    """While the body runs, the signals that ask a process to end make the node drain.

    The first one makes it `leave`, if there is a cluster to leave to; another one ends it at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        del frame
        stop = partial(server.stop, f"the node got {signal.Signals(number).name}")
        if asked or leave is None:
            stop()
        else:
            asked = True
            server.soon(partial(leave, stop))

    before = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
