"""One peer at the reader's side: its connections, its breaker, and what it is believed to have.

Blocks are read only while the breaker is closed. A peer that did not answer is tried again by the
next probe that the breaker lets pass, on a thread that no read waits for; what it was believed to
have is forgotten, since it may have started anew. A connection that was idle may have died without
a word: a request on it that fails before an answer began is made once more on a new one.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvist.core.errors import FormatError, KvistError, TierTimeout
from kvist.core.keys import Key
from kvist.core.outcome import Outcome
from kvist.node.peers import messages as m
from kvist.node.peers.handshake import SelfMetError
from kvist.node.peers.wire import Wire
from kvist.node.protocol import ProtocolError, join_keys
from kvist.store.breaker import Breaker, BreakerState
from kvist.tiers.remote.knowledge import Knowledge

_log = logging.getLogger(__name__)
_WARN_EVERY_S = 10.0

Item = tuple[int, Key, memoryview]
Settle = Callable[[int, Outcome], None]


class LeftAloneError(TierTimeout):
    """Nobody waits any more for what was asked."""


@dataclass(slots=True)
class MemberCounts:
    """Totals of one peer."""

    blocks: int = 0
    size_bytes: int = 0
    absent: int = 0
    damaged: int = 0
    failed: int = 0


class Member:
    """One peer and one keyspace. Thread-safe."""

    def __init__(
        self,
        name: str,
        open_wire: Callable[[float], Wire],
        known: Knowledge,
        breaker: Breaker,
        *,
        timeout_s: float,
        connect_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connects to nobody yet.

        Args:
            name: HOST:PORT.
            open_wire: makes a connection on which the handshake is over, by a deadline.
            known: what it is believed to have.
            breaker: its own.
            timeout_s: a block or an answer that takes longer is late.
            connect_s: a connection that takes longer is none.
            clock: seconds that only grow.
        """
        self.name, self.known = name, known
        self._open_wire, self._breaker = open_wire, breaker
        self._timeout_s, self._connect_s, self._clock = timeout_s, connect_s, clock
        self._lock = threading.Lock()
        self._idle: list[Wire] = []
        self._queued_bytes = 0
        self._itself = False
        self._closed = False
        self._warn_at_s = 0.0
        self.counts = MemberCounts()

    @property
    def queued_bytes(self) -> int:
        """Bytes of blocks that are being read, or wait to be."""
        return self._queued_bytes

    def readable(self) -> bool:
        """Whether blocks may be read from it now."""
        return not self._itself and self._breaker.state is BreakerState.CLOSED

    def askable(self) -> bool:
        """Whether it may be asked what it has."""
        if self._itself:
            return False
        with self._lock:
            return self._breaker.peek()

    def resting(self) -> bool:
        """Whether it failed and is left alone."""
        return not self._itself and self._breaker.state is not BreakerState.CLOSED

    def book(self, size_bytes: int) -> None:
        """Bytes are to be read from it, or, negative, were."""
        with self._lock:
            self._queued_bytes += size_bytes

    def probe(self, keys: Sequence[Key]) -> int:
        """Asks which of `keys` it has and remembers; how many there are.

        Raises:
            KvistError: it refuses, or broke a rule.
            OSError: it could not be asked.
        """
        with self._lock:
            if self._itself or not self._breaker.acquire():
                return 0
        found: set[Key] = set()
        mark = self.known.mark()
        for start in range(0, len(keys), m.MOST_HAVE_KEYS):
            part = keys[start : start + m.MOST_HAVE_KEYS]
            request = m.Have(join_keys(part))
            until = self._clock() + self._connect_s + self._timeout_s

            def held(wire: Wire, part: Sequence[Key] = part, until: float = until) -> None:
                raw = wire.hear(m.MOST_HAVE_KEYS, until)
                answer = m.decode(m.HELD, raw[m.HEAD.size :])
                flags = m.unpack_bits(answer.bits, len(part))
                found.update(key for key, flag in zip(part, flags, strict=True) if flag)

            self._call(request, held, until)
        self.known.drop(set(keys).difference(found), since=mark)
        self.known.add(dict.fromkeys(found, 0), since=mark)
        return len(found)

    def read(
        self,
        items: Sequence[Item],
        settle: Settle,
        until: float,
        wanted: Callable[[], bool],
        before_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Reads blocks into their buffers and calls `settle` as each is decided.

        `wanted` is asked between two blocks; when it says no, the rest is let be. `before_wait` is
        called when the next one is not there yet.

        Raises:
            KvistError: it broke a rule, or (`TierTimeout`) is too slow; some may not be settled.
            OSError: the connection broke.
        """
        left = dict(enumerate(items))
        budget_s = max(0.0, min(until - self._clock(), m.MOST_READ_S))
        request = m.Read(join_keys([key for _, key, _ in items]), budget_s)

        def receive(wire: Wire) -> None:
            header = bytearray(m.BLOCK.size)
            while left:
                if not wanted():
                    raise LeftAloneError(errno.ECANCELED, "nobody waits any more")
                if not wire.ready():
                    before_wait()
                limit = min(until, self._clock() + self._timeout_s)
                wire.fill(memoryview(header), limit)
                n, status, size_bytes, expected, key = m.BLOCK.unpack(header)
                if n not in left or left[n][1] != key:
                    raise ProtocolError(f"block {n} was not asked for, or came before")
                index, _, out = left.pop(n)
                settle(index, self._block(wire, key, out, status, size_bytes, expected, limit))

        self._call(request, receive, until, unanswered=lambda: len(left) == len(items))

    def _block(
        self,
        wire: Wire,
        key: Key,
        out: memoryview,
        status: int,
        size_bytes: int,
        expected: int,
        limit: float,
    ) -> Outcome:
        if status == m.MISS and not size_bytes:
            with self._lock:
                self.counts.absent += 1
            self.known.drop((key,))
            return Outcome.MISS
        if status != m.HIT or size_bytes != out.nbytes:
            raise ProtocolError(f"a block of {size_bytes} bytes in place of {out.nbytes}")
        if wire.fill_block(out, limit) != expected:
            with self._lock:
                self.counts.damaged += 1
            self.known.drop((key,))
            self._fail(f"sent a damaged block {key.hex()[:12]}")
            return Outcome.MISS
        with self._lock:
            self.counts.blocks += 1
            self.counts.size_bytes += size_bytes
        return Outcome.HIT

    def close(self) -> None:
        """Hangs up on every idle connection; those in use end with their call. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()

    def samples(self) -> Mapping[str, float]:
        """Metrics of this peer."""
        counts, name = self.counts, self.name
        return {
            f"kvist_peer_blocks_total.{name}": float(counts.blocks),
            f"kvist_peer_bytes_total.{name}": float(counts.size_bytes),
            f"kvist_peer_absent_total.{name}": float(counts.absent),
            f"kvist_peer_damaged_total.{name}": float(counts.damaged),
            f"kvist_peer_failures_total.{name}": float(counts.failed),
            f"kvist_peer_resting.{name}": float(self.resting()),
        }

    def _call(
        self,
        request: m.Have | m.Read,
        receive: Callable[[Wire], None],
        until: float,
        *,
        unanswered: Callable[[], bool] = lambda: True,
    ) -> None:
        """One request and its answer; tells the breaker how it went.

        While it is `unanswered`, it may be made again on a new connection.
        """
        try:
            wire = self._take()
            if wire is not None:
                try:
                    self._exchange(wire, request, receive, until)
                    self._succeed()
                    return
                except ConnectionError:
                    if not unanswered():
                        raise
            wire = self._open_wire(min(until, self._clock() + self._connect_s))
            self._exchange(wire, request, receive, until)
            self._succeed()
        except SelfMetError:
            self._itself = True
            _log.info("peer %s is this node itself: it is left out", self.name)
        except FormatError as error:
            self._fail(str(error))
            raise
        except LeftAloneError:
            raise
        except (KvistError, OSError) as error:
            self._fail(getattr(error, "strerror", None) or str(error), for_now=True)
            raise

    def _exchange(
        self, wire: Wire, request: m.Have | m.Read, receive: Callable[[Wire], None], until: float
    ) -> None:
        done = False
        try:
            wire.tell(request, until)
            receive(wire)
            done = True
        finally:
            with self._lock:
                keep = done and not self._closed
                if keep:
                    self._idle.append(wire)
            if not keep:
                wire.close()

    def _take(self) -> Wire | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _succeed(self) -> None:
        with self._lock:
            self._breaker.succeed()

    def _fail(self, why: str, *, for_now: bool = False) -> None:
        """A failure; `for_now`: there is no use in asking again soon."""
        now_s = self._clock()
        with self._lock:
            self.counts.failed += 1
            idle, self._idle = (self._idle, []) if for_now else ([], self._idle)
            if for_now:
                self._breaker.trip()
            else:
                self._breaker.fail()
            rests = self._breaker.state is not BreakerState.CLOSED
            warn = now_s >= self._warn_at_s
            if warn:
                self._warn_at_s = now_s + _WARN_EVERY_S
        for wire in idle:
            wire.close()
        if rests:
            self.known.clear()
        if warn:
            _log.warning("peer %s: %s%s", self.name, why, "; it rests" if rests else "")
