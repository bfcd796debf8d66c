"""Links that transfers share fairly.

Theory of operation. A link divides its bandwidth evenly between the flows on it (processor
sharing). A flow over several links runs at the least of its shares; what it leaves of the others
is not handed on, so the model errs to the slow side. A rate only changes when a flow joins or
leaves one of its links, or a link's bandwidth does; then the flows on those links are settled and
their ends computed anew, so nothing is approximated between events. A flow first waits its
latency, in which it takes no bandwidth.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import Enum

from kvist.sim.des.kernel import Action, Event, Kernel


class LinkKind(Enum):
    """A link of a node, by what it joins; reads and writes, in and out do not share."""

    H2D = "h2d"
    D2H = "d2h"
    NIC_IN = "nic_in"
    NIC_OUT = "nic_out"
    SSD_READ = "ssd_read"
    SSD_WRITE = "ssd_write"


class Link:
    """One direction of one medium of one node."""

    __slots__ = ("bytes_per_s", "factor", "flows", "kind", "latency_s", "moved_bytes", "node")

    def __init__(self, kind: LinkKind, node: int, bytes_per_s: float, latency_s: float) -> None:
        self.kind = kind
        self.node = node
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.factor = 1.0  # below 1 while it is degraded
        self.flows: dict[Flow, None] = {}  # in order of joining
        self.moved_bytes = 0.0

    def share_bytes_per_s(self) -> float:
        """What each flow on it may take now."""
        return self.bytes_per_s * self.factor / max(1, len(self.flows))


class Flow:
    """A transfer under way. Only `Network` changes it."""

    __slots__ = ("done", "event", "links", "moved_bytes", "open", "rate", "since_s", "size_bytes")

    def __init__(self, links: Sequence[Link], size_bytes: float, done: Action) -> None:
        self.links = tuple(links)
        self.size_bytes = size_bytes
        self.moved_bytes = 0.0
        self.rate = 0.0
        self.since_s = 0.0
        self.open = True
        self.event: Event | None = None
        self.done = done


class Network:
    """All flows of a cluster."""

    __slots__ = ("_kernel", "last_s")

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.last_s = 0.0  # when a flow last ended

    def start(
        self, links: Sequence[Link], size_bytes: float, done: Action, *, delay_s: float = 0.0
    ) -> Flow:
        """Starts a transfer over `links`; `done` is called when its last byte is there.

        Args:
            links: one or more, each once.
            delay_s: time beside the links' latencies before it begins.
        """
        flow = Flow(links, size_bytes, done)
        latency_s = delay_s + sum(link.latency_s for link in flow.links)
        flow.event = self._kernel.after(latency_s, functools.partial(self._join, flow))
        return flow

    def cancel(self, flow: Flow) -> float:
        """Ends a flow early; returns the bytes that it moved. One that is over is ignored."""
        if not flow.open:
            return flow.moved_bytes
        self._settle(flow)
        self._leave(flow)
        return flow.moved_bytes

    def moved_bytes(self, flow: Flow) -> float:
        """Bytes that a flow has moved so far."""
        if flow.open:
            self._settle(flow)
        return flow.moved_bytes

    def set_factor(self, link: Link, factor: float) -> None:
        """Makes a link slower, or whole again with 1."""
        link.factor = factor
        self._retime((link,))

    def _join(self, flow: Flow) -> None:
        flow.event = None
        flow.since_s = self._kernel.now_s
        if flow.size_bytes <= 0:
            self._finish(flow)
            return
        for link in flow.links:
            link.flows[flow] = None
        self._retime(flow.links)

    def _settle(self, flow: Flow) -> None:
        now_s = self._kernel.now_s
        moved = flow.moved_bytes + flow.rate * (now_s - flow.since_s)
        flow.moved_bytes = min(flow.size_bytes, moved)
        flow.since_s = now_s

    def _retime(self, links: Sequence[Link]) -> None:
        touched = dict.fromkeys(flow for link in links for flow in link.flows)
        for flow in touched:
            rate = min(link.share_bytes_per_s() for link in flow.links)
            if rate == flow.rate:
                continue
            self._settle(flow)
            flow.rate = rate
            self._kernel.cancel(flow.event)
            left_s = (flow.size_bytes - flow.moved_bytes) / rate
            flow.event = self._kernel.after(left_s, functools.partial(self._finish, flow))

    def _finish(self, flow: Flow) -> None:
        flow.moved_bytes = flow.size_bytes
        self._leave(flow)
        flow.done()

    def _leave(self, flow: Flow) -> None:
        flow.open = False
        self.last_s = self._kernel.now_s
        self._kernel.cancel(flow.event)
        flow.event = None
        joined = [link for link in flow.links if flow in link.flows]
        for link in joined:
            del link.flows[flow]
            link.moved_bytes += flow.moved_bytes
        self._retime(joined)
