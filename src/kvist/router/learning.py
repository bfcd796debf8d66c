"""How fast a replica computes prompts, learned from first tokens alone.

An engine computes several prompts in one pass or one in several, and a gateway sees only when each
gave its first token. What it can tell is how long the replica was busy, from idle to idle, with a
sum of prompts. Such a period is one observation; one with a prompt that was loaded in part, or that
shared its steps with decodes, says nothing of computing and is left out.
"""

from __future__ import annotations

from kvist.cost.prefill import PrefillTimes

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
