"""One peer at the reader's side: its connections, its threads and its breaker.

Blocks are read only while the breaker is closed. A peer that did not answer is tried again by the
next question that the breaker lets pass, on a thread that no read waits for. A connection that was
idle may have died without a word: a request on it that fails before an answer began is made once
more on a new one.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvist.adapters.crew import Crew
from kvist.cluster.directory import Position
from kvist.core.errors import FormatError, KvistError, TierTimeout
from kvist.core.keys import Key
from kvist.core.outcome import Outcome
from kvist.native.answer import DAMAGED, HIT, MISS
from kvist.native.answers_twin import Taken
from kvist.node.peers import messages as m
from kvist.node.peers.handshake import SelfMetError
from kvist.node.peers.wire import Wire
from kvist.node.protocol import join_keys
from kvist.store.breaker import Breaker, BreakerState

_log = logging.getLogger(__name__)
_WARN_EVERY_S = 10.0

# Each telling wakes threads in several processes: no answer waits for longer, and what several
# connections have is told at the same times, multiples of this by the clock.
_TELL_S = 20e-3

Item = tuple[int, Key, memoryview]
Settled = tuple[int, Outcome]
Settle = Callable[[list[Settled]], None]


# A peer has not brought a block; as of where in its stream it surely has none, if it is sure.
Lacks = Callable[[Key, Position | None], None]


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
        breaker: Breaker,
        *,
        streams: int,
        timeout_s: float,
        connect_s: float,
        lacks: Lacks,
        rests: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connects to nobody yet.

        Args:
            name: HOST:PORT.
            open_wire: makes a connection on which the handshake is over, by a deadline.
            breaker: its own.
            streams: calls that bring blocks at once.
            timeout_s: a block or an answer that takes longer is late.
            connect_s: a connection that takes longer is none.
            lacks: is told which block it has not brought.
            rests: is told that it failed and is left alone.
            clock: seconds that only grow.
        """
        self.name = name
        self.crew = Crew(streams, name="kvist-peer-read")
        self.asker = Crew(1, name="kvist-peer-ask")
        self._open_wire, self._breaker = open_wire, breaker
        self._lacks, self._rests = lacks, rests
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

    def probe(self, keys: Sequence[Key]) -> set[Key] | None:
        """Asks which of `keys` it has; `None` if it is left alone. Without keys: whether it lives.

        Raises:
            KvistError: it refuses, or broke a rule.
            OSError: it could not be asked.
        """
        if not self._may_ask():
            return None
        found: set[Key] = set()
        for start in range(0, max(1, len(keys)), m.MOST_HAVE_KEYS):
            part = keys[start : start + m.MOST_HAVE_KEYS]
            until = self._clock() + self._connect_s + self._timeout_s

            def held(wire: Wire, part: Sequence[Key] = part, until: float = until) -> None:
                raw = wire.hear(m.MOST_HAVE_KEYS, until)
                answer = m.decode(m.HELD, raw[m.HEAD.size :])
                flags = m.unpack_bits(answer.bits, len(part))
                found.update(key for key, flag in zip(part, flags, strict=True) if flag)

            self._call(m.Have(join_keys(part)), held, until)
        return found

    def offer(self, offer: m.Offer) -> int:
        """Offers it blocks; how many it will fetch.

        Raises:
            KvistError: it refuses, or broke a rule.
            OSError: it could not be asked.
        """
        if not self._may_ask():
            return 0
        until = self._clock() + self._connect_s + self._timeout_s
        taken = 0

        def heard(wire: Wire) -> None:
            nonlocal taken
            raw = wire.hear(m.MOST_STRANGER_BYTES, until)
            taken = m.decode(m.TAKEN, raw[m.HEAD.size :]).count

        self._call(offer, heard, until)
        return taken

    def read(
        self,
        items: Sequence[Item],
        settle: Settle,
        until: float,
        wanted: Callable[[], bool],
    ) -> None:
        """Reads blocks into their buffers and calls `settle` with what is decided, a few at a time.

        `wanted` is asked before each wait; when it says no, the rest is let be.

        Raises:
            KvistError: it broke a rule, or (`TierTimeout`) is too slow; some may not be settled.
            OSError: the connection broke.
        """
        keys, outs = [key for _, key, _ in items], [out for _, _, out in items]
        budget_s = max(0.0, min(until - self._clock(), m.MOST_READ_S))
        answered = False

        def receive(wire: Wire) -> None:
            nonlocal answered
            answers = wire.answers(keys, outs)
            while answers.left:
                if not wanted():
                    raise LeftAloneError(errno.ECANCELED, "nobody waits any more")
                tell_s = _TELL_S - self._clock() % _TELL_S
                taken = wire.take(answers, until, self._timeout_s, tell_s)
                if taken:
                    answered = True
                    settle(self._outcomes(items, taken))

        request = m.Read(join_keys(keys), budget_s)
        self._call(request, receive, until, unanswered=lambda: not answered)

    def _outcomes(self, items: Sequence[Item], taken: Sequence[Taken]) -> list[Settled]:
        """What became of blocks; tells of those that have not come."""
        hits = [items[n] for n, found, _ in taken if found == HIT]
        with self._lock:
            self.counts.blocks += len(hits)
            self.counts.size_bytes += sum(out.nbytes for _, _, out in hits)
            self.counts.absent += sum(found == MISS for _, found, _ in taken)
            self.counts.damaged += sum(found == DAMAGED for _, found, _ in taken)
        for n, found, at in taken:
            if found != HIT:
                key = items[n][1]
                self._lacks(key, None if at is None else Position(*at))
                if found == DAMAGED:
                    self._fail(f"sent a damaged block {key.hex()[:12]}")
        return [
            (items[n][0], Outcome.HIT if found == HIT else Outcome.MISS) for n, found, _ in taken
        ]

    def close(self) -> None:
        """Ends its threads and hangs up; calls that are under way come to their end. Idempotent."""
        for crew in (self.crew, self.asker):
            crew.close()
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
        request: m.Request,
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
        self, wire: Wire, request: m.Request, receive: Callable[[Wire], None], until: float
    ) -> None:
        done = False
        try:
            wire.ask(request, until)
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

    def _may_ask(self) -> bool:
        with self._lock:
            return not self._itself and self._breaker.acquire()

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
            self._rests()
        if warn:
            _log.warning("peer %s: %s%s", self.name, why, "; it rests" if rests else "")
