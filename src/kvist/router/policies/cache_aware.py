"""The least predicted TTFT of a request by itself."""

from __future__ import annotations

from kvist.router.candidates import Candidate, Prefix
from kvist.router.policies.protocol import Ranked
from kvist.router.protocol import Ask


class CacheAware(Ranked):
    """The least predicted TTFT: queue, and the least of recomputing, loading and fetching.

    Source: Mooncake (FAST'25), Algorithm 1. With `peers` off it counts on own blocks only.
    """

    def __init__(self, *, peers: bool) -> None:
        self._peers = peers

    def rank(self, ask: Ask, candidate: Candidate) -> tuple[float, ...]:
        """Predicted TTFT, then the decode step."""
        serve_s = candidate.serve_s(self.reuse(candidate))
        return candidate.queue_s() + serve_s, candidate.step_s()

    def reuse(self, candidate: Candidate) -> Prefix:
        """With peers, or without."""
        found = candidate.prefix()
        return found if self._peers else found.alone()
