"""Any replica."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvist.router.candidates import Candidate
from kvist.router.policies.protocol import Ranked
from kvist.router.protocol import Ask


class RandomChoice(Ranked):
    """Any replica, by seed."""

    def __init__(self, stream: random.Random) -> None:
        self._stream = stream

    def rank(self, ask: Ask, candidate: Candidate) -> tuple[float, ...]:
        """A draw."""
        return (self._stream.random(),)

    def pick_decode(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        """Any."""
        return self._stream.choice(candidates)
