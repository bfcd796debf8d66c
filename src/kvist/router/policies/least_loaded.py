"""The replica with the least to do."""

from __future__ import annotations

from kvist.router.candidates import Candidate
from kvist.router.policies.protocol import Ranked
from kvist.router.protocol import Ask


class LeastLoaded(Ranked):
    """The shortest predicted queue of prefill; of equal ones the shortest decode step."""

    def rank(self, ask: Ask, candidate: Candidate) -> tuple[float, ...]:
        """Queue, then step."""
        return candidate.queue_s(), candidate.step_s()
