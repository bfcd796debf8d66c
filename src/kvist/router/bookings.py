"""What was sent to one replica and is not over: prompts to compute, contexts that decode, blocks.

Theory of operation. A booking opens three accounts and closes each once. *Work*: seconds of
prefill, until the first token. Prompts are taken to be computed in order, so what is left of them
is their sum less the time since the last of them ended, of which no more counts than the one in
front takes; one whose end nobody sees ends when it is predicted to. *Contexts*: tokens of KV that
decode reads, expected from the booking on and live from the first token on. *Blocks*: unique keys,
counted by reference; a prompt whose first blocks another one here holds will find them computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvist.core.keys import Key
from kvist.router.lengths import Distribution


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt to compute: predicted seconds; tokens to compute, and those that are cached.

    `loads` says whether the cached ones come from below HBM, `seen` whether its end will be seen.
    """

    serve_s: float
    new_tokens: int
    cached_tokens: int
    loads: bool = False
    seen: bool = True


class PrefillQueue:
    """Prompts that wait or are computed, in order of arrival."""

    __slots__ = ("_since_s", "_work", "_work_s", "tokens")

    def __init__(self) -> None:
        self._work: dict[int, Work] = {}
        self._work_s = 0.0
        self._since_s = 0.0  # when the one in front began
        self.tokens = 0  # not computed yet

    def __len__(self) -> int:
        return len(self._work)

    def add(self, booking: int, work: Work, now_s: float) -> None:
        """A prompt behind the others."""
        if not self._work:
            self._since_s = now_s
        self._work[booking] = work
        self._work_s += work.serve_s
        self.tokens += work.new_tokens

    def remove(self, booking: int, now_s: float) -> None:
        """A prompt that was computed, or will not be; one that is not here is ignored."""
        work = self._work.pop(booking, None)
        if work is None:
            return
        self._work_s = self._work_s - work.serve_s if self._work else 0.0
        self.tokens -= work.new_tokens
        self._since_s = now_s

    def left_s(self, now_s: float) -> float:
        """Seconds until all are computed."""
        self._pass_unseen(now_s)
        if not self._work:
            return 0.0
        front = next(iter(self._work.values()))
        return max(0.0, self._work_s - min(max(0.0, now_s - self._since_s), front.serve_s))

    def _pass_unseen(self, now_s: float) -> None:
        """Ends those in front that must be computed by now, and will not say so."""
        while self._work:
            booking, front = next(iter(self._work.items()))
            end_s = self._since_s + front.serve_s
            if front.seen or now_s < end_s:
                return
            self.remove(booking, end_s)


@dataclass(slots=True)
class Context:
    """A request that decodes, or will: it is live from `since_s` on, predicted until `live`.

    `times` are seconds that decodes of its kind last.
    """

    tokens: int
    since_s: float
    times: Distribution
    live: bool = False


class Contexts:
    """Requests that decode or will decode here."""

    __slots__ = ("_contexts", "changes", "expected", "live", "live_tokens", "timed", "tokens")

    def __init__(self) -> None:
        self._contexts: dict[int, Context] = {}
        self.changes = 0  # of who is live
        self.expected = 0
        self.live = 0
        self.live_tokens = 0
        self.timed = 0  # most that were live in a step of which the time was seen
        self.tokens = 0  # of all, live or not

    def __len__(self) -> int:
        return len(self._contexts)

    def __iter__(self) -> Iterator[Context]:
        return iter(self._contexts.values())

    def expect(self, booking: int, tokens: int, at_s: float, times: Distribution) -> None:
        """A request that will begin to decode at about `at_s`, and last as `times` say."""
        self._contexts[booking] = Context(tokens, at_s, times)
        self.expected += 1
        self.tokens += tokens

    def begin(self, booking: int, now_s: float) -> None:
        """Its first token is there."""
        context = self._contexts.get(booking)
        if context is None or context.live:
            return
        context.live, context.since_s = True, now_s
        self.changes += 1
        self.expected -= 1
        self.live += 1
        self.live_tokens += context.tokens

    def grow(self, booking: int, tokens: int) -> None:
        """Its context has `tokens` more."""
        context = self._contexts.get(booking)
        if context is not None:
            context.tokens += tokens
            self.tokens += tokens
            self.live_tokens += tokens if context.live else 0

    def remove(self, booking: int) -> Context | None:
        """It is over; None if it was not here."""
        context = self._contexts.pop(booking, None)
        if context is None:
            return None
        self.tokens -= context.tokens
        if context.live:
            self.changes += 1
            self.live -= 1
            self.live_tokens -= context.tokens
        else:
            self.expected -= 1
        return context


class HeldBlocks:
    """Unique blocks of open bookings, counted by reference."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def hold(self, keys: Iterable[Key]) -> None:
        """One more reference to each."""
        counts = self._counts
        for key in keys:
            counts[key] = counts.get(key, 0) + 1

    def release(self, keys: Iterable[Key]) -> None:
        """One reference less to each."""
        counts = self._counts
        for key in keys:
            left = counts[key] - 1
            if left:
                counts[key] = left
            else:
                del counts[key]

    def leading(self, keys: Sequence[Key]) -> int:
        """How many of the first `keys` are held."""
        counts = self._counts
        for count, key in enumerate(keys):
            if key not in counts:
                return count
        return len(keys)
