"""Which nodes serve a request, and whether at all: the slots, and what is shipped for them.

A router sees the cluster through `ClusterView` and answers with a `Placement`; an admission judges
that. Both decide at once and change nothing.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from kvist.core.keys import Key
from kvist.sim.des.report import Refusal
from kvist.sim.des.spec import AdmissionKind, Role, RouterKind, Slo


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a router knows of a request. `keys` are of the blocks that could spare computing."""

    keys: tuple[Key, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """Leading tokens of a prompt that a node need not compute, by how it would get them."""

    hbm_tokens: int
    own_tokens: int  # in HBM or in tiers of the node
    ssd_tokens: int  # of these, on its SSD
    reachable_tokens: int  # also from peers


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


class ClusterView(Protocol):
    """The cluster as a router sees it."""

    def nodes(self) -> Seq[NodeView]:
        """Nodes that are alive."""
        ...

    def prefix(self, arrival: Arrival, node: NodeView) -> Prefix:
        """What a node would not have to compute."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes and what is predicted of it there."""

    prefill: int
    decode: int  # the same node where one does both
    serve_s: float  # load and prefill, without the queue
    ttft_s: float
    tbt_s: float


class Router(Protocol):
    """Chooses nodes."""

    def choose(self, arrival: Arrival, cluster: ClusterView) -> Placement | None:
        """The nodes for a request; None where none is alive that could serve it."""
        ...


class Admission(Protocol):
    """Says whether a request is served at all."""

    def admits(self, arrival: Arrival, placement: Placement) -> Refusal | None:
        """None to serve it, else why not."""
        ...


class TakeAll:
    """Refuses nothing: the null admission."""

    def admits(self, arrival: Arrival, placement: Placement) -> Refusal | None:
        """None."""
        return None


class WithinSlo:
    """Refuses a request that is predicted to miss its SLO (Mooncake's Algorithm 1)."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo

    def admits(self, arrival: Arrival, placement: Placement) -> Refusal | None:
        """The first part of the SLO that is predicted to break."""
        if placement.ttft_s > self._slo.ttft_s:
            return Refusal.TTFT
        return Refusal.TBT if placement.tbt_s > self._slo.tbt_s else None


class _Ranked(ABC):
    """Picks the prefill node of the least rank, then the decode node of the shortest step."""

    def choose(self, arrival: Arrival, cluster: ClusterView) -> Placement | None:
        """The node of the least rank, the first of equals."""
        nodes = cluster.nodes()
        prefills = [node for node in nodes if node.role is not Role.DECODE]
        decodes = [node for node in nodes if node.role is not Role.PREFILL]
        if not prefills or not decodes:
            return None
        node = min(prefills, key=lambda n: (self.rank(arrival, n, cluster), n.index))
        serve_s = node.serve_s(arrival.prompt_tokens, self.prefix(arrival, node, cluster))
        decode = node if node.role is Role.MIXED else self.decode(arrival, decodes)
        return Placement(
            prefill=node.index,
            decode=decode.index,
            serve_s=serve_s,
            ttft_s=node.queue_s() + serve_s,
            tbt_s=decode.step_s(arrival.prompt_tokens),
        )

    @abstractmethod
    def rank(self, arrival: Arrival, node: NodeView, cluster: ClusterView) -> tuple[float, ...]:
        """Least is best."""

    def prefix(self, arrival: Arrival, node: NodeView, cluster: ClusterView) -> Prefix:
        """What the prediction counts on."""
        return cluster.prefix(arrival, node)

    def decode(self, arrival: Arrival, nodes: Seq[NodeView]) -> NodeView:
        """The decode node of a disaggregated request."""
        return min(nodes, key=lambda n: (n.step_s(arrival.prompt_tokens), n.index))


class RandomRouter(_Ranked):
    """Any node, by seed."""

    def __init__(self, stream: random.Random) -> None:
        self._stream = stream

    def rank(self, arrival: Arrival, node: NodeView, cluster: ClusterView) -> tuple[float, ...]:
        """A draw."""
        return (self._stream.random(),)

    def decode(self, arrival: Arrival, nodes: Seq[NodeView]) -> NodeView:
        """Any."""
        return self._stream.choice(nodes)


class LeastLoaded(_Ranked):
    """The shortest predicted queue of prefill; of equal ones the shortest decode step."""

    def rank(self, arrival: Arrival, node: NodeView, cluster: ClusterView) -> tuple[float, ...]:
        """Queue, then step."""
        return node.queue_s(), node.step_s(arrival.prompt_tokens)


class CacheAware(_Ranked):
    """The least predicted TTFT: queue, and the least of recomputing, loading and fetching.

    Source: Mooncake (FAST'25), Algorithm 1; it fetches above a threshold of lengths, this where
    fetching is predicted to be faster. With `peers` off it counts on a node's own blocks only.
    """

    def __init__(self, *, peers: bool) -> None:
        self._peers = peers

    def rank(self, arrival: Arrival, node: NodeView, cluster: ClusterView) -> tuple[float, ...]:
        """Predicted TTFT, then the decode step."""
        prefix = self.prefix(arrival, node, cluster)
        serve_s = node.serve_s(arrival.prompt_tokens, prefix)
        return node.queue_s() + serve_s, node.step_s(arrival.prompt_tokens)

    def prefix(self, arrival: Arrival, node: NodeView, cluster: ClusterView) -> Prefix:
        """With peers, or without."""
        found = cluster.prefix(arrival, node)
        if self._peers:
            return found
        own = found.own_tokens
        return Prefix(found.hbm_tokens, own, found.ssd_tokens, own)


def shipped_router(kind: RouterKind, stream: random.Random) -> Router:
    """The router of a kind; `stream` is for the one that draws."""
    if kind is RouterKind.RANDOM:
        return RandomRouter(stream)
    if kind is RouterKind.LEAST_LOADED:
        return LeastLoaded()
    return CacheAware(peers=kind is RouterKind.CACHE_AWARE)


def shipped_admission(kind: AdmissionKind, slo: Slo) -> Admission:
    """The admission of a kind."""
    return WithinSlo(slo) if kind is AdmissionKind.SLO else TakeAll()
