"""One publisher's stream as one reader sees it: in order, and asking for what is missing.

    number <= last             a duplicate: ignored
    number == last + 1         applied; then what was held and follows on
    begins with `Cleared`      applied whatever came before: a start, or a dump
    anything else              a gap: held (a bounded number), and after `patience_s` asked for
    higher incarnation         the publisher was restarted: everything of before is void
    lower incarnation          a late message of a former start: ignored

An ask is repeated, ever more rarely, until the gap is closed. No other clock is ever read.

A stock engine names no incarnation (0). Its messages come over one connection, in order, so a
number that is not above the last one, or a 0 after others, says that it was restarted, unless it
answers an ask. It makes no dumps: where its replay begins later than what was asked for, or nobody
answers `most_asks` times, the reader goes on from what it has (`leap`), and what it knew of before
is void. Where the connection to it broke, it may have been restarted with nobody hearing its first
messages: everything is asked for again (`anew`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from kvist.cluster.wire import Batch


@dataclass(frozen=True, slots=True)
class Ask:
    """A reader wants a publisher's batches from `number` on."""

    node: str
    incarnation: int
    number: int


@dataclass(frozen=True, slots=True)
class Patience:
    """How long readers wait. `patience_s`: for a message that may only be late.

    `most_asks`: of a stock engine in a row, until a reader does without an answer.
    """

    patience_s: float = 0.05
    retry_s: float = 0.5
    most_retry_s: float = 8.0
    most_held: int = 256
    most_asks: int = 4


class Progress(msgspec.Struct, frozen=True, gc=False):
    """What a message made ready. `restarted`: all entries of the publisher are void before it."""

    batches: tuple[Batch, ...]
    restarted: bool = False


_NOTHING = Progress(())


class Follower:
    """The place in one publisher's stream up to which a reader has applied it.

    Attributes:
        gaps: losses that had to be asked for, whether a later batch or a beat told of them.
        duplicates, stale: messages that brought nothing.
    """

    __slots__ = (
        "_ask_at_s",
        "_asks",
        "_held",
        "_in_gap",
        "_live",
        "_newest",
        "_patience",
        "_retry_s",
        "duplicates",
        "gaps",
        "incarnation",
        "last",
        "node",
        "stale",
    )

    def __init__(self, node: str, patience: Patience, *, incarnation: int = 0) -> None:
        self.node = node
        self.incarnation = incarnation
        self.last = -1  # number of the last batch that was applied
        self.gaps = self.duplicates = self.stale = 0
        self._patience = patience
        self._held: dict[int, Batch] = {}
        self._newest = -1  # the highest number that was heard of
        self._live = -1  # of the last message that came by itself
        self._asks = 0  # since anything was applied
        self._in_gap = False
        self._ask_at_s = math.inf
        self._retry_s = patience.retry_s

    @property
    def complete(self) -> bool:
        """Whether everything that was heard of is applied."""
        return self.last >= self._newest

    def take(self, batch: Batch, now_s: float) -> Progress:
        """Takes a message; what comes back is to be applied, in this order."""
        following = batch.number == self.last + 1 and batch.incarnation == self.incarnation
        if following and self.last == self._newest:  # as nearly all are
            self.last = self._newest = batch.number
            self._live = self._live if batch.replayed else batch.number
            return Progress((batch,))
        if batch.incarnation < self.incarnation:
            self.stale += 1
            return _NOTHING
        restarted = self._begins_anew(batch)
        if restarted:
            self._begin(batch.incarnation)
        self._live = self._live if batch.replayed else batch.number
        self._newest = max(self._newest, batch.number)
        if batch.number <= self.last:
            self.duplicates += 1
            return _NOTHING
        if batch.number != self.last + 1 and not batch.is_base:
            self._hold(batch, now_s)
            return Progress((), restarted)
        return Progress(self._applied(batch, now_s), restarted)

    def leap(self, now_s: float) -> Progress:
        """A stock engine has answered all that it can: begins at the oldest batch that is held."""
        if self.incarnation or not self._held:
            return _NOTHING
        oldest = self._held.pop(min(self._held))
        return Progress(self._applied(oldest, now_s), restarted=True)

    def anew(self, now_s: float) -> None:
        """A stock engine's stream may have begun anew: all of it is asked for."""
        self._begin(0)
        self._newest, self._ask_at_s = 0, now_s

    def is_unanswered(self, now_s: float) -> bool:
        """Whether a stock engine does not answer, and something of it could be applied."""
        waited = now_s >= self._ask_at_s and self._asks >= self._patience.most_asks
        return waited and self.incarnation == 0 and bool(self._held)

    def expect(self, incarnation: int, newest: int, now_s: float) -> None:
        """The publisher is said to have published up to `newest`; what lacks is asked for."""
        if incarnation < self.incarnation:
            return
        if incarnation > self.incarnation:
            self._begin(incarnation)
        self._newest = max(self._newest, newest)
        if not self.complete and self._ask_at_s == math.inf:
            self._ask_at_s = now_s + (self._patience.patience_s if self.last >= 0 else 0.0)

    def ask(self, now_s: float) -> Ask | None:
        """What to ask the publisher for now, if anything."""
        if now_s < self._ask_at_s:
            return None
        self.gaps += not self._in_gap and self.last >= 0  # a start is none
        self._in_gap = True
        self._asks += 1
        self._ask_at_s = now_s + self._retry_s
        self._retry_s = min(2 * self._retry_s, self._patience.most_retry_s)
        return Ask(self.node, self.incarnation, self.last + 1)

    def _applied(self, batch: Batch, now_s: float) -> tuple[Batch, ...]:
        """A batch and those held that follow it."""
        ready = [batch]
        self.last = batch.number
        while (held := self._held.pop(self.last + 1, None)) is not None:
            ready.append(held)
            self.last = held.number
        if self._held:
            self._held = {n: b for n, b in self._held.items() if n > self.last}
        self._retry_s = self._patience.retry_s
        self._asks = 0
        self._in_gap = self._in_gap and not self.complete
        self._ask_at_s = math.inf if self.complete else now_s + self._patience.patience_s
        return tuple(ready)

    def _begins_anew(self, batch: Batch) -> bool:
        """Whether a message is of a later start than those before it."""
        if batch.incarnation or batch.replayed:
            return batch.incarnation > self.incarnation
        return batch.number <= self._live or (batch.number == 0 and self.last > 0)

    def _begin(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.last = self._newest = self._live = -1
        self._asks = 0
        self._held.clear()
        self._in_gap = False
        self._ask_at_s = math.inf
        self._retry_s = self._patience.retry_s

    def _hold(self, batch: Batch, now_s: float) -> None:
        if batch.number in self._held:
            self.duplicates += 1
        elif len(self._held) < self._patience.most_held:  # else the answer brings it again
            self._held[batch.number] = batch
        if self._ask_at_s == math.inf:
            self._ask_at_s = now_s + self._patience.patience_s
