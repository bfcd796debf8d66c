"""A replica as a policy sees it for one request, and where the knowledge of prefixes comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvist.core.keys import Key


@dataclass(frozen=True, slots=True)
class Prefix:
    """Leading tokens of a prompt that a replica need not compute, by how it would get them."""

    hbm_tokens: int
    own_tokens: int  # in HBM or in tiers of its node
    ssd_tokens: int  # of these, on its SSD
    reachable_tokens: int  # also from peers

    def alone(self) -> Prefix:
        """The same without the help of peers."""
        return Prefix(self.hbm_tokens, self.own_tokens, self.ssd_tokens, self.own_tokens)

    def by_tier(self, tokens: int) -> dict[str, int]:
        """Where the first `tokens` come from, those that need not be computed; none left out."""
        hbm = min(tokens, self.hbm_tokens)
        peer = max(0, tokens - max(hbm, self.own_tokens))
        ssd = max(0, min(self.ssd_tokens, tokens - hbm - peer))
        parts = {"hbm": hbm, "dram": tokens - hbm - peer - ssd, "ssd": ssd, "peer": peer}
        return {tier: count for tier, count in parts.items() if count}


NOTHING = Prefix(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica is known to work on.

    Attributes:
        requests: waiting, computing or decoding.
        waiting: of these, without a first token.
        prefill_tokens: prompt tokens that are still to be computed.
        blocks: unique blocks of KV that these requests hold.
        new_blocks: how many more the request would add.
    """

    requests: int
    waiting: int
    prefill_tokens: int
    blocks: int
    new_blocks: int


class Candidate(Protocol):
    """A replica that could take one request; all seconds are predictions of the cost model."""

    @property
    def name(self) -> str:
        """The replica."""
        ...

    @property
    def role(self) -> str:
        """`both`, `prefill` or `decode`."""
        ...

    @property
    def known(self) -> Known:
        """What it has seen of the request's session and adapter."""
        ...

    def queue_s(self) -> float:
        """Seconds until a prompt that arrives now would begin."""
        ...

    def step_s(self) -> float:
        """Seconds of a decode step with the request in it."""
        ...

    def prefix(self) -> Prefix:
        """What of the prompt it would not have to compute."""
        ...

    def serve_s(self, prefix: Prefix) -> float:
        """Seconds of load and prefill: the least of computing, loading and fetching."""
        ...

    def stalls_s(self, prefix: Prefix) -> float:
        """Of these, seconds in which those that decode there get no token within their limit."""
        ...

    def load(self) -> Load:
        """What it works on."""
        ...


@dataclass(frozen=True, slots=True)
class Known:
    """Whether a session's last request went to this replica, and its adapter was used there."""

    session: bool = False
    lora: bool = True


class Prefixes(Protocol):
    """Who holds how much of a prompt: an index of KV events, or a guess from past choices."""

    def match(self, keys: Sequence[Key]) -> Mapping[str, Prefix]:
        """Prefixes by replica; replicas that hold nothing may be left out.

        `reachable_tokens` is what a replica could have with the help of its peers, and the same
        for all that share a store; where only some are named, the largest counts for the others.
        Called under the router's lock, often: it must answer at once and not call back.
        """
        ...


@runtime_checkable
class LearnsChoices(Protocol):
    """What `Prefixes` may do besides: predict from choices. Called under the router's lock."""

    def expire(self, now_s: float) -> None:
        """Predictions that are too old end; called before each `match`."""
        ...

    def chosen(self, replica: str, keys: Sequence[Key], now_s: float) -> None:
        """A request with these blocks was sent to a replica, which will have them soon."""
        ...

    def removed(self, replica: str) -> None:
        """A replica is gone, with all that it had."""
        ...
