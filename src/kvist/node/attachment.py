"""A client's connection to a node: calls and their answers, the mapped arena, what is held of it.

One thread receives; any thread calls. A call has a deadline, and a node that lets one pass counts
as stalled: until it says something again, every call is answered at once with nothing. Where the
connection ends, it is over for good: every call gets nothing, every lease is dead. The arena stays
mapped and its bytes stay as they are for those who are in the middle of a copy, since the life pipe
keeps a living node from giving the slots to others (`server.py`), and a dead one gives nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvist.core.errors import NodeAwayError, NodeRefusedError
from kvist.node import messages as m
from kvist.node.place import peer_uid
from kvist.node.protocol import MOST_BYTES, Frames, ProtocolError, decode_reply, encode
from kvist.tiers.dram import ArenaMap

_log = logging.getLogger(__name__)
_RECEIVE_BYTES = 256 << 10
_GRANTS = (m.Leased, m.Reserved)


class Granted(Protocol):
    """A lease of this client that may be told something."""

    def granted(self, reply: m.Leased | m.Reserved) -> None:
        """The node granted it."""
        ...

    def settled(self, news: m.Settled) -> None:
        """Blocks of it were decided; the caller holds `changed`."""
        ...


@dataclass(slots=True)
class _Call:
    lease: Granted | None
    reply: m.Reply | None = None
    done: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.done.acquire(blocking=False)


class Attachment:
    """One life of a connection. Made by `attach`; `run` serves it until it ends."""

    def __init__(
        self,
        link: socket.socket,
        welcome: m.Welcome,
        arena: ArenaMap,
        frames: Frames,
        *,
        base: int,
        answer_s: float,
        on_event: Callable[[m.Events], None],
    ) -> None:
        """Takes over `link` and `arena`; `frames` holds what came after the welcome.

        `base` is added to every offset in the arena.
        """
        self.arena, self.base, self.welcome = arena, base, welcome
        self.alive = True
        self.stalled = False
        self.farewell = ""  # the node's last words, if it had any
        self.changed = threading.Condition()
        self._link, self._answer_s, self._on_event = link, answer_s, on_event
        self._frames = frames
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._leases: dict[int, Granted] = {}
        self._last_call = 0
        self._let_go = False

    # -- calls ------------------------------------------------------------------------------

    def call(
        self,
        make: Callable[[int], m.Request],
        lease: Granted | None = None,
        *,
        timeout_s: float | None = None,
    ) -> m.Reply | None:
        """Sends a request and waits for its answer; `None` if none came in time.

        With a `timeout_s` of its own, a call that is late says nothing about the node.
        """
        if not self.alive or self.stalled:
            return None
        call = _Call(lease)
        with self._lock:
            self._last_call = number = (self._last_call + 1) & 0xFFFFFFFF
        data = encode(make(number))
        with self._lock:
            if not self.alive:
                return None
            self._calls[number] = call
        if self._transmit(data):
            limit_s = self._answer_s if timeout_s is None else timeout_s
            if call.done.acquire(timeout=limit_s):
                return call.reply
        with self._lock:
            if self._calls.pop(number, None) is None:
                return call.reply  # it has come meanwhile
        if timeout_s is None and self.alive:
            self.stalled = True
            _log.warning("the node has not answered within %g s", self._answer_s)
        return None

    def tell(self, message: m.Request) -> None:
        """Sends what has no answer."""
        if self.alive:
            self._transmit(encode(message))

    def _transmit(self, data: bytes) -> bool:
        until = time.monotonic() + self._answer_s
        view = memoryview(data)
        with self._sending:
            try:
                while view:
                    try:
                        view = view[self._link.send(view, socket.MSG_DONTWAIT) :]
                    except BlockingIOError:
                        if not _writable(self._link, until - time.monotonic()):
                            raise TimeoutError("the node takes nothing") from None
            except (OSError, ValueError) as error:  # ValueError: it was closed meanwhile
                if self.alive:
                    _log.warning("the connection to the node is given up: %s", error)
                self.hang_up()
                return False
        return True

    # -- what comes -------------------------------------------------------------------------

    def run(self) -> None:
        """Receives until the connection ends."""
        data = b""
        try:
            while True:
                for body in self._frames.feed(data):
                    self._heard(decode_reply(body))
                if not (data := self._link.recv(_RECEIVE_BYTES)):
                    break
        except (OSError, ProtocolError) as error:
            _log.warning("the connection to the node broke: %s", error)
        finally:
            self._end()

    def _heard(self, reply: m.Reply) -> None:
        self.stalled = False
        if isinstance(reply, m.Settled):
            with self.changed:
                lease = self._leases.get(reply.lease)
                if lease is not None:
                    lease.settled(reply)
                self.changed.notify_all()
        elif isinstance(reply, m.Events):
            self._on_event(reply)
        elif isinstance(reply, m.Goodbye | m.Refused):
            self.farewell = reply.reason
        elif not isinstance(reply, m.Welcome | m.Report):
            self._answered(reply.id, reply)

    def _answered(self, number: int, reply: m.Reply) -> None:
        with self._lock:
            call = self._calls.pop(number, None)
            if call is not None:
                if isinstance(reply, _GRANTS) and call.lease is not None:
                    call.lease.granted(reply)
                    self._leases[reply.lease] = call.lease
                call.reply = reply
        if call is not None:
            call.done.release()
        elif isinstance(reply, _GRANTS):
            self.tell(m.Release(reply.lease))  # nobody waits for it any more

    # -- what is held -----------------------------------------------------------------------

    def release(self, number: int) -> None:
        """A lease is over."""
        with self._lock:
            known = self._leases.pop(number, None) is not None
        if known:
            self.tell(m.Release(number))
        self._let_go_if_over()

    def slot_view(self, slot: int) -> memoryview:
        """The bytes of a block.

        Raises:
            ClosedError: the attachment is over and was let go of.
        """
        return self.arena.view(slot)[: self.welcome.block_bytes]

    def hang_up(self) -> None:
        """Ends the connection; `run` returns."""
        with contextlib.suppress(OSError):  # it has ended already
            self._link.shutdown(socket.SHUT_RDWR)

    def _end(self) -> None:
        with self._lock:
            self.alive = False
            calls = list(self._calls.values())
            self._calls.clear()
        for call in calls:
            call.done.release()
        with self.changed:
            self.changed.notify_all()
        with self._sending:
            self._link.close()
        self._let_go_if_over()

    def _let_go_if_over(self) -> None:
        """Once dead and with no lease left, tells the node that nobody touches its slots."""
        with self._lock:
            if self.alive or self._leases or self._let_go:
                return
            self._let_go = True
        self.arena.close()  # and the life pipe with it


def _writable(link: socket.socket, timeout_s: float) -> bool:
    """Whether the socket takes bytes, or is broken, within the time."""
    if timeout_s <= 0:
        return False
    poll = select.poll()  # `select` cannot watch descriptors above 1023
    poll.register(link, select.POLLOUT)
    return bool(poll.poll(timeout_s * 1000))


def attach(
    path: str,
    hello: m.Hello,
    *,
    base: int,
    answer_s: float,
    deadline_s: float,
    on_event: Callable[[m.Events], None],
) -> Attachment:
    """Connects, says hello and maps the arena.

    Raises:
        NodeAwayError: nobody listens there, or nobody answered within `deadline_s`.
        NodeRefusedError: the node does not want us.
    """
    link = connect(path, deadline_s)
    fds: list[int] = []
    try:
        link.sendall(encode(hello))
        frames = Frames(MOST_BYTES)
        data, fds, _, _ = socket.recv_fds(link, _RECEIVE_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        welcome = _welcome(next(frames.feed(data), b""))
        if len(fds) != 2 or welcome.block_bytes != hello.block_bytes:
            raise NodeRefusedError("the node's answer is not what was asked for")
        (arena_fd, life), fds = fds, []
        size, slot = welcome.size_bytes, welcome.slot_bytes
        arena = ArenaMap(arena_fd, size, slot_bytes=slot, life=life)
    except (OSError, ValueError) as error:  # a FormatError is a ValueError
        _abandon(link, fds)
        raise NodeAwayError(f"{path}: {error or 'no answer'}") from error
    except BaseException:
        _abandon(link, fds)
        raise
    link.settimeout(None)
    return Attachment(link, welcome, arena, frames, base=base, answer_s=answer_s, on_event=on_event)


def connect(path: str, deadline_s: float) -> socket.socket:
    """A connection to a node's socket, whose calls take no longer than `deadline_s`.

    Whoever listens decides which bytes count as a prompt's KV: it must be this very user.

    Raises:
        NodeAwayError: nobody listens there.
        NodeRefusedError: another user does.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(deadline_s)
    try:
        link.connect(path)
    except OSError as error:
        link.close()
        raise NodeAwayError(
            f"no node listens on {path}: {error.strerror or error}; start one with `kvist node`"
        ) from error
    if peer_uid(link) != os.geteuid():
        link.close()
        raise NodeRefusedError(f"another user listens on {path}", for_good=True)
    return link


def _welcome(body: bytes) -> m.Welcome:
    """The first answer, which is sent in one piece."""
    if not body:
        raise ProtocolError("the node hung up")
    reply = decode_reply(body)
    if isinstance(reply, m.Refused):
        raise NodeRefusedError(reply.reason, for_good=reply.for_good)
    if not isinstance(reply, m.Welcome):
        raise ProtocolError(f"the first answer is {type(reply).__name__}")
    return reply


def _abandon(link: socket.socket, fds: list[int]) -> None:
    link.close()
    for fd in fds:
        os.close(fd)
