"""Who an engine tells of its requests."""

from __future__ import annotations

from typing import Protocol

from kvist.sim.des.sequence import Sequence


class Owner(Protocol):
    """Called between an engine's steps; may submit, bind and release, but not step."""

    def prefill_starts(self, sequence: Sequence) -> None:
        """The first part of a prompt begins to be computed."""
        ...

    def prefilled(self, sequence: Sequence) -> None:
        """A prompt was computed and gave a token; HBM is still held."""
        ...

    def hand_over(self, sequence: Sequence) -> None:
        """A prefill node is done with a request that goes on elsewhere; HBM is still held."""
        ...

    def finished(self, sequence: Sequence) -> None:
        """A request has all its tokens; HBM was given back."""
        ...
