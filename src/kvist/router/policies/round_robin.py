"""One replica after the other."""

from __future__ import annotations

from collections.abc import Sequence

from kvist.router.candidates import Candidate, Prefix
from kvist.router.protocol import Ask


class RoundRobin:
    """Each replica in its turn, in the order in which they are given."""

    def __init__(self) -> None:
        self._prefills = 0
        self._decodes = 0

    def pick(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        """The next one."""
        self._prefills += 1
        return candidates[(self._prefills - 1) % len(candidates)]

    def pick_decode(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        """The next one, in a turn of its own."""
        self._decodes += 1
        return candidates[(self._decodes - 1) % len(candidates)]

    def reuse(self, candidate: Candidate) -> Prefix:
        """All that there is."""
        return candidate.prefix()
