"""The slot for a policy, and the base of those that rank replicas one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from kvist.router.candidates import Candidate, Prefix
from kvist.router.protocol import Ask


class Policy(Protocol):
    """Picks replicas. May count what it picked, but books nothing; one caller at a time."""

    def pick(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        """The replica that computes the prompt; there is at least one candidate."""
        ...

    def pick_decode(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        """The decode replica of a disaggregated request; likewise."""
        ...

    def reuse(self, candidate: Candidate) -> Prefix:
        """What the prediction counts on not to be computed."""
        ...


class Ranked(ABC):
    """Picks the replica of the least rank, the first of equals; decode: the shortest step."""

    def pick(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        """See `Policy`."""
        return min(candidates, key=lambda candidate: self.rank(ask, candidate))

    def pick_decode(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        """See `Policy`."""
        return min(candidates, key=lambda candidate: candidate.step_s())

    def reuse(self, candidate: Candidate) -> Prefix:
        """All that there is."""
        return candidate.prefix()

    @abstractmethod
    def rank(self, ask: Ask, candidate: Candidate) -> tuple[float, ...]:
        """Least is best."""
