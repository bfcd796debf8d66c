"""The better of two replicas that were drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvist.router.candidates import Candidate, Prefix
from kvist.router.protocol import Ask


class PowerOfTwo:
    """Draws two replicas and takes the one with fewer requests.

    Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing (2001).
    """

    def __init__(self, stream: random.Random) -> None:
        self._stream = stream

    def pick(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        """The one with fewer requests, the first drawn of equals."""
        two = self._stream.sample(candidates, min(2, len(candidates)))
        return min(two, key=lambda candidate: candidate.load().requests)

    def pick_decode(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        """Likewise."""
        return self.pick(ask, candidates)

    def reuse(self, candidate: Candidate) -> Prefix:
        """All that there is."""
        return candidate.prefix()
