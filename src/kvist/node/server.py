"""The node's socket: one loop, one thread, every connection.

A connection is accepted from this user only (`SO_PEERCRED`), has a few seconds to say what it wants
and gets, with the answer, two descriptors: the arena's memfd, and the writing end of a life pipe
(`lives.py`), at whose end its leases are given back. The end of the connection does not say that: a
worker may outlive its engine, and an engine whose connection broke may still copy.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import time
from collections.abc import Callable

import msgspec

from kvist.core.errors import StoreError
from kvist.node import messages as m
from kvist.node.cache.counter import Counter
from kvist.node.cache.messages import FIRST_PROTOCOL as CACHE_PROTOCOL
from kvist.node.handover import BEQUEATH
from kvist.node.keyspaces import Attach, Keyspace, Keyspaces
from kvist.node.lives import Lives
from kvist.node.peer import Peer, Stage
from kvist.node.place import peer_uid
from kvist.node.protocol import (
    MOST_BYTES,
    ProtocolError,
    choose_protocol,
    decode_first,
    decode_request,
    encode,
)
from kvist.node.survey import check, status
from kvist.node.work import SlowWork

_log = logging.getLogger(__name__)
MOST_CLIENTS = 256
FIRST_S = 5.0  # a connection that has not said by then what it wants is closed
_TICK_S = 0.5
_SETTLE_S = 0.05  # how often what is waited for is looked at, should no poke come
_RECEIVE_BYTES = 64 << 10
_COUNTER_S = 0.2  # the end does not wait for what a person asked
_HURRIED = (Stage.FIRST, Stage.ASKING, Stage.LEAVING)  # they leave if nothing comes


class NodeServer:
    """Serves a listening socket until it is stopped."""

    def __init__(
        self,
        listener: socket.socket,
        make_keyspaces: Callable[[SlowWork, Callable[[], None]], Keyspaces],
        *,
        uid_of: Callable[[socket.socket], int] = peer_uid,
        clock: Callable[[], float] = time.monotonic,
        describe: Callable[[], dict[str, object]] = dict,
        hand_over: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """`describe` adds to what `status` says; `hand_over` calls what it gets when it is done."""
        self._listener, self._uid_of, self._clock = listener, uid_of, clock
        self._describe, self._hand_over = describe, hand_over
        self._began = self._next_tick = clock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poked = False
        self._stop: str | None = None
        self._due: Callable[[], None] | None = None
        self._work = SlowWork(self.poke)
        self.keyspaces = make_keyspaces(self._work, self.poke)
        self._counter = Counter(self.keyspaces, self.poke, clock, self._send)
        self._epoll = select.epoll()
        self._peers: dict[int, Peer] = {}  # by socket
        self._unsent: set[Peer] = set()
        self.lives = Lives()
        self._last_session, self._accepting = 0, True
        self.heir: socket.socket | None = None  # of the next node, which takes over
        self.refused_connections = 0

    def poke(self) -> None:
        """Makes the loop look around; on any thread."""
        if not self._poked:
            self._poked = True
            os.eventfd_write(self._wake, 1)

    def stop(self, reason: str) -> None:
        """Ends `run`; on any thread, or in a signal handler."""
        self._stop, self._poked = reason, False
        self.poke()

    @property
    def stopping(self) -> bool:
        """Whether it was told to end."""
        return self._stop is not None

    def soon(self, call: Callable[[], None]) -> None:
        """Calls it on the loop's thread; for a signal handler. The last one counts."""
        self._due, self._poked = call, False
        self.poke()

    def run(self) -> None:
        """Serves until `stop`. Then no lease is granted any more, and every engine knows."""
        self._begin()
        try:
            while self._stop is None:
                self._turn(_SETTLE_S if self.keyspaces.waits() else _TICK_S)
        finally:
            self._end()

    def _begin(self) -> None:
        self._listener.settimeout(0)
        self._epoll.register(self._listener, select.EPOLLIN)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._next_tick = self._clock() + _TICK_S

    def _turn(self, wait_s: float) -> None:
        """Deals with what has happened; waits for something at most `wait_s`."""
        for fd, mask in self._epoll.poll(wait_s, 64):
            self._event(fd, mask)
        if self._due is not None:
            due, self._due = self._due, None
            due()
        self._work.deliver()
        self._counter.deliver()
        self.keyspaces.settle()
        self._flush_all()
        if (now := self._clock()) >= self._next_tick:
            self._next_tick = now + _TICK_S
            self._tick(now)

    # -- events -----------------------------------------------------------------------------

    def _event(self, fd: int, mask: int) -> None:
        if fd == self._wake:
            os.eventfd_read(self._wake)
            self._poked = False  # after the read: a poke between the two would be lost
        elif fd == self._listener.fileno():
            self._accept()
        elif fd in self.lives:
            self._died(fd)
        elif (peer := self._peers.get(fd)) is not None:
            if mask & select.EPOLLOUT:
                self._flush(peer)
            if mask & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                self._receive(peer)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                _log.warning("cannot accept: %s", error)
                self._accepting = False  # until the next tick
                self._epoll.modify(self._listener, 0)
            return
        self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        connection.settimeout(0)
        peer = Peer(connection, self._clock() + FIRST_S)
        self._peers[connection.fileno()] = peer
        self._epoll.register(connection, select.EPOLLIN)
        if self._uid_of(connection) != os.geteuid():
            self.refused_connections += 1
            self._refuse(peer, "this node belongs to another user", for_good=True)
        elif len(self._peers) + len(self.lives) > 2 * MOST_CLIENTS:
            self._refuse(peer, f"this node serves {MOST_CLIENTS} clients already", for_good=False)

    def _receive(self, peer: Peer) -> None:
        try:
            data = peer.socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            return
        try:
            for body in peer.frames.feed(data):
                self._message(peer, body)
                if peer.stage is Stage.GONE:
                    return
        except ProtocolError as error:
            _log.warning("client %s: %s", peer.name, error)
            self._refuse(peer, str(error), for_good=True)
        self._watch(peer)

    def _message(self, peer: Peer, body: bytes) -> None:
        if peer.stage is Stage.OPEN and peer.session is not None:
            peer.session.handle(decode_request(body))
        elif peer.stage is Stage.FIRST:
            self._greet(peer, decode_first(body))
        elif peer.stage in (Stage.ASKING, Stage.WAITING):
            self._counter.take(peer, body)
        elif peer.stage is Stage.OPENING:
            raise ProtocolError("a request came before the handshake was over")

    def _tick(self, now: float) -> None:
        if not self._accepting:
            self._accepting = True
            self._epoll.modify(self._listener, select.EPOLLIN)
        self._counter.tick()
        for peer in list(self._peers.values()):
            if peer.stage in _HURRIED and now >= peer.leave_at:
                self._drop(peer)

    # -- the handshake ----------------------------------------------------------------------

    def _greet(self, peer: Peer, first: m.First) -> None:
        protocol = choose_protocol(first.oldest, first.newest)
        if protocol is None:
            ours = f"{m.OLDEST_PROTOCOL} to {m.NEWEST_PROTOCOL}"
            theirs = f"{first.oldest} to {first.newest}"
            reason = f"this node speaks protocols {ours}, the client {theirs}; update the older one"
            self._refuse(peer, reason, for_good=True)
        elif isinstance(first, m.Control):
            self._control(peer, first.what, protocol)
        else:
            hello = first
            peer.name = f"{hello.name or 'engine'} ({hello.pid})"
            peer.stage = Stage.OPENING
            attach = Attach(hello.fingerprint, hello.layout, hello.block_bytes)
            self.keyspaces.find(attach, lambda found: self._opened(peer, hello, protocol, found))

    def _opened(self, peer: Peer, hello: m.Hello, protocol: int, found: Keyspace | str) -> None:
        if peer.stage is not Stage.OPENING:
            return
        if isinstance(found, str):
            _log.warning("client %s is refused: %s", peer.name, found)
            self._refuse(peer, found, for_good=False)
            return
        arena = found.store.arena
        self._last_session += 1
        try:
            life, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:  # no descriptor is left
            self._refuse(peer, f"the node cannot take a client: {error}", for_good=False)
            return
        welcome = m.Welcome(
            protocol,
            os.getpid(),
            self._last_session,
            arena.size_bytes,
            arena.slot_bytes,
            found.store.raw_bytes,
        )
        try:
            socket.send_fds(peer.socket, [encode(welcome)], [arena.fd, theirs])
        except OSError:
            os.close(life)
            self._drop(peer)
            return
        finally:
            os.close(theirs)
        peer.stage, peer.life = Stage.OPEN, life
        peer.frames.most_bytes = MOST_BYTES
        peer.session = found.session(
            lambda message: self._send(peer, message),
            self._work,
            self._clock,
            wants_events=hello.wants_events,
        )
        self.lives.add(found, peer)
        self._epoll.register(life, 0)  # only its end is told
        self._watch(peer)
        _log.info("client %s attached", peer.name)

    def _control(self, peer: Peer, what: str, protocol: int) -> None:
        peer.stage = Stage.OPENING
        if what == "cache" and protocol >= CACHE_PROTOCOL:
            self._send(peer, m.Report(f'{{"protocol": {protocol}}}'))
            self._counter.open(peer)
            peer.frames.most_bytes = MOST_BYTES
            return
        if what in ("drain", BEQUEATH):
            if what == BEQUEATH and self.heir is None:
                with contextlib.suppress(OSError):  # without a descriptor it gets nothing
                    self.heir = peer.socket.dup()
            self._report(peer, '{"draining": true}')
            self.stop("drained")
            return
        if what == "hand-over":
            if self._hand_over is None:
                self._refuse(peer, "this node is in no cluster; `kvist node stop`", for_good=True)
                return
            self._hand_over(lambda: self.stop("handed over"))
            self._report(peer, '{"draining": true}')
            return
        find = {"status": status, "check": check}.get(what)
        if find is None:
            raise ProtocolError(f"there is nothing to ask about {what!r}")
        facts = {
            **self._describe(),
            "pid": os.getpid(),
            "protocol": m.NEWEST_PROTOCOL,
            "uptime_s": self._clock() - self._began,
            "clients": sum(p.stage is Stage.OPEN for p in self._peers.values()),
            "lingering": self.lives.lingering,
        }
        keyspaces = list(self.keyspaces)
        try:
            self._work.submit(
                lambda: find(facts, keyspaces), lambda text: self._report(peer, str(text))
            )
        except StoreError as error:
            self._refuse(peer, str(error), for_good=False)

    # -- sending and ending -----------------------------------------------------------------

    def _report(self, peer: Peer, text: str) -> None:
        if peer.stage is Stage.OPENING:
            self._send(peer, m.Report(text))
            self._leave(peer)

    def _refuse(self, peer: Peer, reason: str, *, for_good: bool) -> None:
        if peer.stage in (Stage.LEAVING, Stage.GONE):
            return
        self._send(peer, m.Refused(reason[:2000], for_good))
        self._leave(peer)

    def _leave(self, peer: Peer) -> None:
        """Nothing is taken from the peer any more; it goes when it has what is left for it."""
        if peer.stage is Stage.GONE:
            return
        peer.stage, peer.leave_at = Stage.LEAVING, self._clock() + FIRST_S
        self._unsent.add(peer)

    def _send(self, peer: Peer, message: msgspec.Struct) -> None:
        if peer.stage is Stage.GONE:
            return
        if not peer.put(encode(message)):
            _log.warning("client %s does not read its answers; it is cut off", peer.name)
            self._drop(peer)
            return
        self._unsent.add(peer)

    def _flush_all(self) -> None:
        """Sends what the events of this turn brought: several answers in one call."""
        unsent, self._unsent = self._unsent, set()
        for peer in unsent:
            if peer.stage is not Stage.GONE:
                self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        if not peer.flush() or (peer.stage is Stage.LEAVING and not peer.out):
            self._drop(peer)
        else:
            self._watch(peer)

    def _watch(self, peer: Peer) -> None:
        if peer.stage is not Stage.GONE and (mask := peer.wants()) != peer.watched:
            peer.watched = mask
            self._epoll.modify(peer.socket, mask)

    def _drop(self, peer: Peer) -> None:
        """Ends a connection; its leases stay until the life pipe says that they may go."""
        if peer.stage is Stage.GONE:
            return
        peer.stage = Stage.GONE
        del self._peers[peer.socket.fileno()]
        self._epoll.unregister(peer.socket)
        peer.socket.close()
        if peer.life >= 0 and peer.session is not None:
            self.lives.keyspace(peer.life).mute(peer.session)

    def _died(self, life: int) -> None:
        """No process is left that could touch the slots of a session."""
        ended = self.lives.over(life)
        if ended is None:
            return
        keyspace, peer = ended
        self._epoll.unregister(life)
        os.close(life)
        peer.life = -1
        if peer.session is not None:
            if peer.session.leases:
                _log.info("client %s is gone: %d leases freed", peer.name, peer.session.leases)
            keyspace.end(peer.session)
        self._drop(peer)

    def _end(self) -> None:
        self._listener.close()
        for peer in list(self._peers.values()):
            if peer.stage is Stage.OPEN:
                self._send(peer, m.Goodbye(self._stop or "the node ends"))
        self._flush_all()
        for peer in list(self._peers.values()):
            self._drop(peer)
        if self.heir is None:  # leases stay, since nothing is granted any more
            self.lives.close()
        self._epoll.close()
        self._work.stop(1.0)
        self._counter.stop(_COUNTER_S)
