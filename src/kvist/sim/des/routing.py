"""Which nodes serve a request, and whether at all: the slot, and policies that see the engines.

A router sees the cluster through `ClusterView` and answers with a `Placement` or a `Refusal`. All
policies are those of `kvist.router`. `SeesEngines` lets one decide by the true state of every
engine; `gateways.py` runs the whole production router on its own bookings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from kvist.core.keys import Key
from kvist.router.candidates import Known, Load, Prefix
from kvist.router.choice import select
from kvist.router.policies.protocol import Policy
from kvist.router.protocol import Ask
from kvist.sim.des.report import Refusal
from kvist.sim.des.spec import Role

LOOK_S = 0.02  # as gateways do
ROLES = {Role.MIXED: "both", Role.PREFILL: "prefill", Role.DECODE: "decode"}


class NodeView(Protocol):
    """A node as a router sees it."""

    @property
    def index(self) -> int:
        """Its number in the cluster."""
        ...

    @property
    def role(self) -> Role:
        """What it does."""
        ...

    def queue_s(self) -> float:
        """Predicted seconds until a prompt that arrives now would begin."""
        ...

    def step_s(self, more_tokens: int) -> float:
        """Predicted seconds of a decode step with one more request of that context."""
        ...

    def serve_s(self, prompt_tokens: int, prefix: Prefix) -> float:
        """Predicted seconds of load and prefill: the least of computing, loading and fetching."""
        ...

    def stalls_s(self, prompt_tokens: int, prefix: Prefix) -> float:
        """Of these, seconds of steps that are longer than the SLO's TBT, where some decode."""
        ...

    def load(self, ask: Ask) -> Load:
        """What it works on."""
        ...


class ClusterView(Protocol):
    """The cluster as a router sees it."""

    def nodes(self) -> Seq[NodeView]:
        """Nodes that are alive."""
        ...

    def prefix(self, ask: Ask, node: NodeView) -> Prefix:
        """What a node would not have to compute."""
        ...

    def match(self, keys: Seq[Key]) -> Mapping[str, Prefix]:
        """The same of every node that is alive, by its number as text."""
        ...

    @property
    def now_s(self) -> float:
        """The virtual time."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes and what is predicted of it there."""

    prefill: int
    decode: int  # the same node where one does both
    serve_s: float  # load and prefill, without the queue


class Router(Protocol):
    """Chooses nodes; is told what became of it. Requests are named by `Ask.request`."""

    def choose(self, ask: Ask, cluster: ClusterView) -> Placement | Refusal | None:
        """The nodes for a request, why it is not served, or None: it waits for `let_on`."""
        ...

    def let_on(self, cluster: ClusterView) -> Iterator[tuple[str, Placement | Refusal]]:
        """Those that waited and are decided now, each before the next is looked at.

        To be called after each `choose` that gave None, and every `LOOK_S` while any waits.
        """
        ...

    def joins(self, request: str) -> Refusal | None:
        """Asked when a request's KV is at its decode node: None to go on."""
        ...

    def first_token(self, request: str, now_s: float) -> None:
        """Its prompt was computed."""
        ...

    def over(self, request: str, tokens: int, now_s: float, *, failed: bool) -> None:
        """It ended after so many tokens of output, or lost its node (`failed`)."""
        ...


class Forgetful:
    """A router that keeps no books: base for those that only choose."""

    def let_on(self, cluster: ClusterView) -> Iterator[tuple[str, Placement | Refusal]]:
        """None waits."""
        return iter(())

    def joins(self, request: str) -> Refusal | None:
        """Goes on."""
        return None

    def first_token(self, request: str, now_s: float) -> None:
        """Nothing."""

    def over(self, request: str, tokens: int, now_s: float, *, failed: bool) -> None:
        """Nothing."""


class SeesEngines(Forgetful):
    """A policy that knows every engine's true state; refuses nothing."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def choose(self, ask: Ask, cluster: ClusterView) -> Placement | Refusal:
        """See `Router`."""
        selected = select(self._policy, ask, [_Seen(n, ask, cluster) for n in cluster.nodes()])
        if selected is None:
            return Refusal.NO_NODE
        return Placement(int(selected.prefill.name), int(selected.decode.name), selected.serve_s)


class _Seen:
    """A node for one request: `kvist.router.candidates.Candidate`."""

    __slots__ = ("_ask", "_cluster", "_node", "_prefix")

    def __init__(self, node: NodeView, ask: Ask, cluster: ClusterView) -> None:
        self._node = node
        self._ask = ask
        self._cluster = cluster
        self._prefix: Prefix | None = None

    @property
    def name(self) -> str:
        return str(self._node.index)

    @property
    def role(self) -> str:
        return ROLES[self._node.role]

    @property
    def known(self) -> Known:
        return Known(session=not self._ask.session)

    def queue_s(self) -> float:
        return self._node.queue_s()

    def step_s(self) -> float:
        return self._node.step_s(self._ask.prompt_tokens)

    def prefix(self) -> Prefix:
        if self._prefix is None:
            self._prefix = self._cluster.prefix(self._ask, self._node)
        return self._prefix

    def serve_s(self, prefix: Prefix) -> float:
        return self._node.serve_s(self._ask.prompt_tokens, prefix)

    def stalls_s(self, prefix: Prefix) -> float:
        return self._node.stalls_s(self._ask.prompt_tokens, prefix)

    def load(self) -> Load:
        return self._node.load(self._ask)
