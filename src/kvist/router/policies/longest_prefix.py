"""The replica that has most of the prompt."""

from __future__ import annotations

from kvist.router.candidates import Candidate
from kvist.router.policies.protocol import Ranked
from kvist.router.protocol import Ask


class LongestPrefix(Ranked):
    """The longest prefix in HBM or the node's own tiers; of equal ones the fewest requests.

    Blind to load: what engines' own routers call prefix-aware, and the yardstick for weighing both.
    """

    def rank(self, ask: Ask, candidate: Candidate) -> tuple[float, ...]:
        """Tokens, then requests."""
        return -candidate.prefix().own_tokens, candidate.load().requests
