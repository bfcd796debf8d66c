"""A carrier as its node sees it: a process that is started again where it ended, and its orders.

One thread a carrier starts the process, hears it and buries it. It lives as long as the process,
which the kernel ends with it: a process is tied to the thread that made it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvist.core.errors import TierError, TierTimeout
from kvist.node.peers.carrying import words as w
from kvist.node.protocol import ProtocolError, decode

_log = logging.getLogger(__name__)
_MODULE = "kvist.node.peers.carrying.process"
START_S = 60.0  # imports of a large package on a busy machine
_LOOK_S = 0.5
_SEND_S = 0.5  # a carrier that takes no order for so long is not alive
_BURY_S = 10.0
_PAUSE_S, _MOST_PAUSE_S = 1.0, 60.0
_WELL_S = 10.0  # who lived so long is started again at once
_MOST_KNOWN = 256
_STDERR = 2


@dataclass(frozen=True, slots=True)
class Shown:
    """The memory of a carrier that is alive, as others read it."""

    life: int
    """Which process it is; no two have the same."""
    address: int
    contact: bytes


@dataclass(slots=True)
class _Life:
    """One process, from its start to its end."""

    number: int
    link: socket.socket
    process: subprocess.Popen[bytes]
    began_s: float
    shown: Shown | None = None
    end: Future[None] = field(default_factory=Future)


class Carrier:
    """One memory that others read and that theirs is read into. Thread-safe."""

    def __init__(
        self,
        kind: str,
        fd: int,
        size_bytes: int,
        *,
        what: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to start the process.

        Args:
            kind: how bytes travel; see `process.make_agent`.
            fd: the memory; the descriptor is duplicated.
            size_bytes: of it.
            what: its name in the log.
            clock: seconds that only grow.
        """
        self._kind, self._size_bytes, self._what, self._clock = kind, size_bytes, what, clock
        self._fd = os.dup(fd)
        self._lock = threading.Lock()  # of everything below, and of what is sent
        self._life: _Life | None = None
        self._lives = 0
        self._numbers = 0
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._fetches: dict[int, Future[None]] = {}
        self._readers = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvist-carrier", daemon=True)
        self._thread.start()

    @property
    def shown(self) -> Shown | None:
        """What others need to read from here; `None` while no process is ready."""
        life = self._life
        return None if life is None else life.shown

    @property
    def pid(self) -> int:
        """The process; 0 while there is none."""
        life = self._life
        return 0 if life is None else life.process.pid

    @property
    def lives(self) -> int:
        """How many processes have been started."""
        return self._lives

    def attend(self, more: int) -> None:
        """So many more readers than before (or fewer) may read from here now."""
        with self._lock:
            self._readers += more
            with contextlib.suppress(TierError):  # the next life is told at its beginning
                self._send(w.Attend(more))

    def fetch(self, contact: bytes, pieces: Sequence[w.Piece]) -> Future[None]:
        """Reads pieces of another carrier's memory into this one's.

        The future gets its result when they are there, and a `TierError` when they never will be:
        with EIO if something may still write to their places as long as the process lives. Until
        the future has ended something may as well.

        Raises:
            TierError: it cannot begin; `TierTimeout`: the process does not answer.
        """
        with self._lock:
            peer = self._introduce(contact)
            self._numbers += 1
            number = self._numbers
            future: Future[None] = Future()
            self._fetches[number] = future
            try:
                self._send(w.Fetch(number, peer, tuple(pieces)))
            except TierError:
                del self._fetches[number]
                raise
        return future

    def forget(self, contact: bytes) -> None:
        """Breaks with another carrier, whose reads fail; the next fetch meets it anew."""
        with self._lock:
            peer = self._known.pop(contact, None)
            if peer is not None:
                with contextlib.suppress(TierError):  # the next life knows nobody
                    self._send(w.Meet(peer, b""))

    def end(self) -> Future[None]:
        """Is done once the process that lives now has ended, and nobody writes to the memory."""
        with self._lock:
            if self._life is not None:
                return self._life.end
        over: Future[None] = Future()
        over.set_result(None)
        return over

    def fence(self) -> None:
        """Kills the process: soon nobody writes to the memory, and every fetch has ended."""
        with self._lock:
            life = self._life
            if life is not None and life.process.poll() is None:
                _log.warning("%s is ended: blocks that never came keep its memory", self._what)
                life.process.kill()

    def close(self) -> None:
        """Ends the process, and every fetch with it. Idempotent."""
        self._closing.set()
        with self._lock:
            life = self._life
            if life is not None:
                life.process.kill()
        self._thread.join(_BURY_S + _LOOK_S)

    # -- orders, with the lock held ---------------------------------------------------------

    def _introduce(self, contact: bytes) -> int:
        """The number by which the process knows an agent; the oldest makes room."""
        if contact in self._known:
            self._known.move_to_end(contact)
            return self._known[contact]
        self._numbers += 1
        self._send(w.Meet(self._numbers, contact))
        self._known[contact] = self._numbers
        if len(self._known) > _MOST_KNOWN:
            self._send(w.Meet(self._known.popitem(last=False)[1], b""))
        return self._known[contact]

    def _send(self, order: w.Order) -> None:
        life = self._life
        if life is None or life.shown is None:
            raise TierError(errno.ENOTCONN, f"{self._what} is not ready")
        self._send_to(life, order)

    def _send_to(self, life: _Life, order: w.Order) -> None:
        try:
            life.link.send(w.packet(order))
        except TimeoutError as error:
            raise TierTimeout(errno.ETIMEDOUT, f"{self._what} takes no orders") from error
        except OSError as error:
            raise TierError(error.errno, f"{self._what} has ended") from error

    # -- the process ------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = 0.0
        while not self._closing.wait(pause_s):
            began_s = self._clock()
            try:
                life = self._begin()
            except OSError as error:
                _log.warning("%s cannot be started: %s", self._what, error)
            else:
                why = self._hear(life)
                self._bury(life)
                if not self._closing.is_set():
                    _log.warning("%s ended (%s); blocks travel over TCP meanwhile", self._what, why)
            well = self._clock() - began_s >= _WELL_S
            pause_s = _PAUSE_S if well else min(max(2 * pause_s, _PAUSE_S), _MOST_PAUSE_S)
        os.close(self._fd)

    def _begin(self) -> _Life:
        """A new process, which is not ready yet.

        Raises:
            OSError: there is none.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        numbers = map(str, (theirs.fileno(), self._fd, self._size_bytes, os.getpid()))
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, self._kind, *numbers],
                pass_fds=(theirs.fileno(), self._fd),
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # NIXL's log is not the node's answer
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.settimeout(_SEND_S)
        with self._lock:
            self._lives += 1
            self._life = _Life(self._lives, ours, process, self._clock())
            if self._closing.is_set():  # `close` may have looked a moment before
                process.kill()
            return self._life

    def _hear(self, life: _Life) -> str:
        """What the process says until it ends; why it ended, as far as it said."""
        poll = select.poll()
        poll.register(life.link, select.POLLIN)
        why = "it said nothing"
        while True:
            if not poll.poll(_LOOK_S * 1e3):
                if life.shown is None and self._clock() - life.began_s > START_S:
                    return "it did not get ready"
                continue
            try:
                data = life.link.recv(w.MOST_PACKET_BYTES)
                if not data:
                    return why
                report = decode(w.REPORT, data)
            except (OSError, ProtocolError) as error:
                return str(error)
            if isinstance(report, w.Fetched):
                self._ended(report)
            elif report.agent:
                self._ready(life, report)
            else:
                why = report.why

    def _ready(self, life: _Life, report: w.Ready) -> None:
        with self._lock:
            life.shown = Shown(life.number, report.address, report.agent)
            if self._readers:
                with contextlib.suppress(TierError):  # it ends already
                    self._send_to(life, w.Attend(self._readers))
        _log.info("%s is ready (process %d)", self._what, life.process.pid)

    def _ended(self, report: w.Fetched) -> None:
        with self._lock:
            future = self._fetches.pop(report.number, None)
        if future is None:
            return
        if report.why:
            future.set_exception(TierError(errno.EIO if report.begun else errno.EINVAL, report.why))
        else:
            future.set_result(None)

    def _bury(self, life: _Life) -> None:
        """Makes sure that the process is no more, and then says so to whoever waits."""
        life.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            life.process.wait(_BURY_S)
        gone = life.process.returncode is not None
        with self._lock:
            self._life = None
            self._known.clear()
            left, self._fetches = self._fetches, {}
            life.link.close()
        if not gone:  # the kernel still holds it: its memory may still be written to
            _log.error("%s (process %d) cannot be ended", self._what, life.process.pid)
            return
        for future in left.values():
            future.set_exception(TierError(errno.ECONNRESET, f"{self._what} has ended"))
        life.end.set_result(None)
