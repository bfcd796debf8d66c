"""How fast a replica is, learned from nothing but when tokens came.

An engine computes several prompts in one pass or one in several, and a gateway sees only when each
gave its first token. What it can tell is how long the replica was busy, from idle to idle, with a
sum of prompts. Such a period is one observation; one with a prompt that was loaded in part, or that
shared its steps with decodes, says nothing of computing and is left out.

A decode step is the time between two looks at a request, over its tokens since, if the same
requests decoded all the while and no prompt was computed beside them; and if the client took them
as they came, since a stream is read no faster than its client reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvist.cost.decode import DecodeTimes
from kvist.cost.prefill import PrefillTimes
from kvist.router.bookings import Contexts

MAX_PROMPTS = 32  # of a period; a replica that is never idle teaches nothing


class BusyPeriod:
    """Prompts of one replica since it was idle. One owner."""

    __slots__ = ("_clean", "_prompts", "_since_s")

    def __init__(self) -> None:
        self._prompts: list[tuple[int, int]] = []
        self._since_s = 0.0
        self._clean = True

    def begin(self, now_s: float) -> None:
        """A prompt came to an idle replica."""
        self._prompts.clear()
        self._since_s = now_s
        self._clean = True

    def spoil(self) -> None:
        """Something happened that makes the period say nothing."""
        self._clean = False

    def computed(self, new_tokens: int, cached_tokens: int) -> None:
        """A prompt gave its first token."""
        self._prompts.append((new_tokens, cached_tokens))
        self._clean = self._clean and len(self._prompts) <= MAX_PROMPTS

    def end(self, now_s: float, times: PrefillTimes) -> None:
        """The replica is idle again: `times` learns."""
        if self._clean and self._prompts and now_s > self._since_s:
            times.observe_pass(self._prompts, now_s - self._since_s)
        self._prompts.clear()


@dataclass(slots=True)
class Stretch:
    """Decode of one request since it was last looked at."""

    since_s: float
    tokens: int
    changes: int

    def look(
        self, tokens: int, now_s: float, contexts: Contexts, times: DecodeTimes, *, alone: bool
    ) -> None:
        """It has so many tokens of output now; `alone` says that no prompt is computed there."""
        new = tokens - self.tokens
        if alone and new > 0 and now_s > self.since_s and contexts.changes == self.changes:
            step_s = (now_s - self.since_s) / new
            times.observe(contexts.live, contexts.live_tokens, step_s)
            contexts.timed = max(contexts.timed, contexts.live)
        self.since_s, self.tokens, self.changes = now_s, tokens, contexts.changes
