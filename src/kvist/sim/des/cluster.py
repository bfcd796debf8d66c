"""A cluster at work: arrivals, routing, engines, the way from prefill to decode, faults.

Theory of operation. A request is placed when it arrives or has waited at its gateway (its prefill
and its decode node at once), queues at its prefill node, and ends exactly once. On a prefill node
its KV leaves over the NICs: after the prefill, or layer by layer beside it, the last layer
following the last token. Where a node is lost, its requests begin anew elsewhere with the tokens
they have as part of the prompt; one that lost its node `MAX_RETRIES` times fails.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from kvist.core.keys import Key
from kvist.router.candidates import Prefix
from kvist.router.choice import make_policy
from kvist.router.policies.kvist import Settings
from kvist.router.protocol import Ask
from kvist.sim.des.arrivals import arrivals
from kvist.sim.des.engine import Engine
from kvist.sim.des.faults import planned_faults
from kvist.sim.des.gateways import Gateways
from kvist.sim.des.kernel import Event, Kernel
from kvist.sim.des.links import Flow, LinkKind, Network
from kvist.sim.des.loading import Loader
from kvist.sim.des.measures import Measures
from kvist.sim.des.node import Node
from kvist.sim.des.report import End, Refusal, Report
from kvist.sim.des.routing import LOOK_S, NodeView, Placement, Router, SeesEngines
from kvist.sim.des.routing_spec import Knows
from kvist.sim.des.sequence import Sequence, State
from kvist.sim.des.spec import (
    ClusterSpec,
    Fault,
    FaultKind,
    FirstToken,
    Handover,
    Role,
    Scope,
)
from kvist.sim.des.store import Store
from kvist.sim.traces import Trace

MAX_RETRIES = 3
_AFFECTED = {
    FaultKind.SLOW_DISK: (LinkKind.SSD_READ, LinkKind.SSD_WRITE),
    FaultKind.DEGRADED_LINK: (LinkKind.NIC_IN, LinkKind.NIC_OUT),
}


def simulate(
    cluster: ClusterSpec,
    trace: Trace,
    *,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    router: Router | None = None,
) -> Report:
    """Plays a trace against a cluster; the same arguments give an equal report.

    Args:
        progress: gets the number of requests that ended, every few dozen.
        router: in place of the shipped one that `cluster` names.

    Raises:
        ConfigError: an eviction order that is unknown, or that cannot be simulated; a scorer that
            cannot be loaded.
    """
    kernel = Kernel(seed)
    chosen = router or shipped_router(kernel, cluster, trace.block_tokens)
    return Cluster(kernel, cluster, trace, chosen, progress).run()


def shipped_router(kernel: Kernel, cluster: ClusterSpec, block_tokens: int) -> Router:
    """The router that `cluster` names: a policy by itself, or gateways with their bookings.

    Raises:
        ConfigError: a scorer that cannot be loaded.
    """
    stream, routing = kernel.stream("router"), cluster.routing
    if routing.knows is Knows.BOOKINGS:
        return Gateways(cluster, block_tokens, stream)
    name = routing.scorer or cluster.router.value
    return SeesEngines(make_policy(name, stream, block_tokens, Settings(routing.temperature)))


class _Sending:
    """KV on its way from a prefill node: the parts that go beside the prefill, and the rest."""

    __slots__ = ("computed", "flow", "rest_bytes")

    def __init__(self, rest_bytes: float) -> None:
        self.flow: Flow | None = None
        self.rest_bytes = rest_bytes
        self.computed = False


class Cluster:
    """One run."""

    def __init__(
        self, kernel: Kernel, spec: ClusterSpec, trace: Trace, router: Router,
        progress: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        self.kernel = kernel
        self.network = Network(kernel)
        self.store = Store(kernel, self.network, spec, trace)
        self.loader = Loader(kernel, self.network, spec, self.store)
        self.engines = [
            Engine(kernel, i, spec, trace.block_tokens, self.loader, self)
            for i in range(len(spec.roles))
        ]
        self._spec = spec
        self._block_tokens = trace.block_tokens
        self._router = router
        self._all = [Node(e, s, spec) for e, s in zip(self.engines, self.store.nodes, strict=True)]
        self._reach: tuple[Ask | None, int] = (None, 0)
        self._sending: dict[Sequence, _Sending] = {}
        self._held: dict[str, Sequence] = {}  # at gateways, by `Ask.request`
        self._look: Event | None = None
        self._down = [0] * len(spec.roles)  # losses that hold now
        self._slowed: dict[tuple[int, FaultKind], list[float]] = {}
        self._shipped_layers = max(1, spec.model.layers)
        timed = arrivals(trace, spec.arrivals, kernel.stream("arrivals"))
        self.measures = Measures(len(timed), progress)
        for number, (time_s, request) in enumerate(timed):
            sequence = Sequence(
                number, request, time_s, trace.block_tokens, spec.arrivals.output_tokens
            )
            kernel.at(time_s, functools.partial(self._arrive, sequence))
        last_s = timed[-1][0] if timed else 0.0
        for fault in planned_faults(spec, last_s, kernel.stream("faults")):
            kernel.at(fault.start_s, functools.partial(self._begin_fault, fault))
            if math.isfinite(fault.end_s):
                kernel.at(fault.end_s, functools.partial(self._end_fault, fault))

    def run(self) -> Report:
        """Runs to the end."""
        self.kernel.run()
        return self.measures.report(
            self._spec,
            self.kernel.seed,
            self.engines,
            self.store,
            self.loader,
            self.kernel.events,
            self.network.last_s,
        )

    # What routers see

    def nodes(self) -> Seq[NodeView]:
        """See `ClusterView`."""
        return [node for node in self._all if node.engine.alive]

    def prefix(self, ask: Ask, node: NodeView) -> Prefix:
        """See `ClusterView`."""
        if self._reach[0] is not ask:
            self._reach = ask, self._reachable(ask.keys)
        return self._prefix(node.index, ask.keys, self._reach[1])

    def match(self, keys: Seq[Key]) -> Mapping[str, Prefix]:
        """See `ClusterView`."""
        chain, far = tuple(keys), self._reachable(keys)
        return {str(n.index): self._prefix(n.index, chain, far) for n in self.nodes()}

    @property
    def now_s(self) -> float:
        """See `ClusterView`."""
        return self.kernel.now_s

    def _reachable(self, keys: Seq[Key]) -> int:
        return 0 if self._spec.store.scope is Scope.LOCAL else self.store.reachable_blocks(keys)

    def _prefix(self, node: int, keys: tuple[Key, ...], far: int) -> Prefix:
        hbm = self.engines[node].memory.matched(keys)
        own, on_ssd = self.store.held_blocks(node, keys, hbm)
        size = self._block_tokens
        return Prefix(hbm * size, own * size, on_ssd * size, max(own, far) * size)

    # The way of a request

    def _arrive(self, sequence: Sequence) -> None:
        whole = max(1, sequence.request.input_tokens) + sequence.output_tokens
        if whole > self._spec.hbm_tokens():
            self._end(sequence, End.REJECTED, Refusal.TOO_LONG)
            return
        usable = sequence.keys[: (sequence.prompt_tokens - 1) // self._block_tokens]
        ask = Ask(
            request=str(sequence.number),
            keys=usable,
            prompt_tokens=sequence.prompt_tokens,
            session=sequence.request.session,
            admitted=sequence.retries > 0,
        )
        found = self._router.choose(ask, self)
        if found is not None:
            self._decided(sequence, found)
            return
        self._held[ask.request] = sequence
        self._let_on()

    def _let_on(self) -> None:
        """Those who waited go on that may; the others are looked at again."""
        for request, found in self._router.let_on(self):
            self._decided(self._held.pop(request), found)
        if self._held and self._look is None:
            self._look = self.kernel.after(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._let_on()

    def _decided(self, sequence: Sequence, found: Placement | Refusal) -> None:
        if isinstance(found, Placement):
            self._place(sequence, found)
        else:
            end = End.FAILED if found is Refusal.NO_NODE else End.REJECTED
            self._end(sequence, end, found)

    def _place(self, sequence: Sequence, placement: Placement) -> None:
        sequence.decode_node = placement.decode
        if placement.decode != placement.prefill:
            self.engines[placement.decode].bind(sequence)
        self.engines[placement.prefill].submit(sequence, placement.serve_s)

    def _end(self, sequence: Sequence, end: End, refusal: Refusal | None = None) -> None:
        sequence.state = State.DONE
        self._router.over(
            str(sequence.number),
            sequence.generated,
            self.kernel.now_s,
            failed=end is not End.FINISHED,
        )
        self.measures.ended(sequence, end, self.kernel.now_s, refusal)

    def _again(self, sequence: Sequence) -> None:
        """A request whose node was lost."""
        if sequence.decode_node >= 0:
            self.engines[sequence.decode_node].unbind(sequence)
        name, now_s = str(sequence.number), self.kernel.now_s
        self._router.over(name, sequence.generated, now_s, failed=True)
        sequence.restart()
        sequence.retries += 1
        self.measures.rerouted += 1
        if sequence.retries > MAX_RETRIES:
            self._end(sequence, End.FAILED, Refusal.LOST)
        else:
            self._arrive(sequence)

    # What engines tell

    def prefill_starts(self, sequence: Sequence) -> None:
        """See `Owner`."""
        leaves = self.engines[sequence.node].role is Role.PREFILL and sequence.left_tokens > 1
        if not leaves:
            return
        size_bytes = self._spec.model.cache_bytes(sequence.prompt_tokens)
        sending = self._sending[sequence] = _Sending(size_bytes)
        layers = self._shipped_layers
        if self._spec.engine.handover is Handover.LAYERWISE and layers > 1:
            sending.rest_bytes = size_bytes / layers
            self._send(sequence, sending, size_bytes - sending.rest_bytes)

    def prefilled(self, sequence: Sequence) -> None:
        """See `Owner`."""
        self._router.first_token(str(sequence.number), self.kernel.now_s)
        if sequence.generated == 1:
            self.store.save(sequence, self.loader.keys_through_dram(sequence))

    def hand_over(self, sequence: Sequence) -> None:
        """See `Owner`."""
        sending = self._sending[sequence]
        sending.computed = True
        if not self.engines[sequence.decode_node].alive:
            self._give_up(sequence)
            self._again(sequence)
        elif sending.flow is None:
            self._send(sequence, sending, sending.rest_bytes)
            sending.rest_bytes = 0.0

    def finished(self, sequence: Sequence) -> None:
        """See `Owner`."""
        self.engines[sequence.decode_node].unbind(sequence)  # it may have ended before it went
        self._end(sequence, End.FINISHED)

    def _send(self, sequence: Sequence, sending: _Sending, size_bytes: float) -> None:
        links = [
            self.store.nodes[sequence.node].links[LinkKind.NIC_OUT],
            self.store.nodes[sequence.decode_node].links[LinkKind.NIC_IN],
        ]
        sent = functools.partial(self._sent, sequence, sending)
        sending.flow = self.network.start(links, size_bytes, sent)

    def _sent(self, sequence: Sequence, sending: _Sending) -> None:
        sending.flow = None
        if not sending.computed:
            return
        if sending.rest_bytes:
            self._send(sequence, sending, sending.rest_bytes)
            sending.rest_bytes = 0.0
            return
        del self._sending[sequence]
        engine = self.engines[sequence.node]
        engine.memory.release(sequence)
        engine.wake()
        refusal = self._router.joins(str(sequence.number))
        if refusal is not None:
            self._refuse_late(sequence, refusal)
            return
        if self._spec.engine.first_token is FirstToken.DECODE:
            sequence.first_token_received(self.kernel.now_s)
        self.engines[sequence.decode_node].join(sequence)

    def _refuse_late(self, sequence: Sequence, refusal: Refusal) -> None:
        """Its prompt was computed for nothing; the user gets no token."""
        self.engines[sequence.decode_node].unbind(sequence)
        sequence.first_token_s = math.inf
        self._end(sequence, End.REJECTED, refusal)

    def _give_up(self, sequence: Sequence) -> None:
        """Drops what was sent; a prefill node that is alive gets its HBM back."""
        sending = self._sending.pop(sequence)
        if sending.flow is not None:
            self.network.cancel(sending.flow)
        engine = self.engines[sequence.node]
        if engine.alive:
            engine.memory.release(sequence)
            engine.wake()

    # Faults

    def _begin_fault(self, fault: Fault) -> None:
        if fault.kind is not FaultKind.LOST_NODE:
            self._slowed.setdefault((fault.node, fault.kind), []).append(fault.factor)
            self._set_speed(fault)
            return
        self._down[fault.node] += 1
        if self._down[fault.node] == 1:
            self._lose(fault.node)

    def _end_fault(self, fault: Fault) -> None:
        if fault.kind is not FaultKind.LOST_NODE:
            self._slowed[fault.node, fault.kind].remove(fault.factor)
            self._set_speed(fault)
            return
        self._down[fault.node] -= 1
        self.engines[fault.node].alive = not self._down[fault.node]

    def _set_speed(self, fault: Fault) -> None:
        factor = math.prod(self._slowed[fault.node, fault.kind])
        for kind in _AFFECTED[fault.kind]:
            self.network.set_factor(self.store.nodes[fault.node].links[kind], factor)

    def _lose(self, node: int) -> None:
        moving = [s for s in self._sending if node in (s.node, s.decode_node)]
        lost = self.engines[node].lose()
        homeless = dict.fromkeys(lost)
        for sequence in moving:
            sending = self._sending[sequence]
            if sequence.node == node or sending.computed:
                self._give_up(sequence)
                homeless[sequence] = None
            elif sending.flow is not None:  # it is still being computed; then it starts anew
                self.network.cancel(sending.flow)
                sending.flow = None
                sending.rest_bytes = self._spec.model.cache_bytes(sequence.prompt_tokens)
        self.loader.lose(node)
        self.store.lose(node)
        for sequence in sorted(homeless, key=lambda s: s.number):
            self._again(sequence)
