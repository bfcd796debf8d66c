"""The production router in a simulated cluster: one or several gateways, each with its bookings.

Gateways know of load only what they booked and what came back, as in production; of prefixes what
the cluster's directory says. Each request comes to a gateway by chance. Reports cross between them
when a request comes or waits, and the last exchange is `exchange_s` ago. Where no node has room a
request waits at its gateway, in the production queue, as `kvist.gateway.waiting` has it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from kvist.core.keys import Key
from kvist.cost.decode import DecodeTimes
from kvist.cost.prefill import PrefillTimes
from kvist.cost.transfer import TransferTimes
from kvist.router.admission import Limits, Rule
from kvist.router.candidates import Prefix
from kvist.router.conductor import KvistRouter, Setting
from kvist.router.fairness import FairQueue
from kvist.router.policies.kvist import Settings
from kvist.router.protocol import Ask, Choice, Refused
from kvist.router.replicas import Speeds
from kvist.router.serving import Loading
from kvist.sim.des.report import Refusal
from kvist.sim.des.routing import ROLES, ClusterView, Placement
from kvist.sim.des.spec import ClusterSpec, LoadPolicy, Prefilling
from kvist.sim.des.store import path_seeds

_REFUSALS = {
    "ttft": Refusal.TTFT,
    "deadline": Refusal.TTFT,
    "tbt": Refusal.TBT,
    "no-replica": Refusal.NO_NODE,
}
_UNBOUNDED = sys.maxsize  # requests that wait: a trace has an end


class _Directory:
    """What the cluster says of prefixes: `kvist.router.candidates.Prefixes`."""

    def __init__(self) -> None:
        self.cluster: ClusterView | None = None

    def match(self, keys: Seq[Key]) -> Mapping[str, Prefix]:
        """See `Prefixes`."""
        return {} if self.cluster is None else self.cluster.match(keys)


class Gateways:
    """See `routing.Router`."""

    def __init__(self, spec: ClusterSpec, block_tokens: int, stream: random.Random) -> None:
        """
        Raises:
            ConfigError: a scorer that cannot be loaded.
        """
        routing = spec.routing
        setting = Setting(
            policy=routing.scorer or spec.router.value,
            kvist=Settings(temperature=routing.temperature),
            admission=Rule(spec.admission.value),
            limits=Limits(spec.slo.ttft_s, spec.slo.tbt_s),
            hold_s=routing.hold_s,
        )
        self._directory = _Directory()
        self._stream = stream
        self._exchange_s = routing.exchange_s
        self._exchanged_s = 0.0
        self._routers = [
            KvistRouter(setting, _speeds(spec, block_tokens), self._directory, stream)
            for _ in range(routing.gateways)
        ]
        self._queues = [
            FairQueue(
                capacity=_UNBOUNDED,
                tenant_capacity=_UNBOUNDED,
                overtaken_s=routing.overtaken_s,
            )
            for _ in self._routers
        ]
        self._came_s: dict[str, float] = {}  # of those that wait
        self._alive = dict.fromkeys(range(len(spec.roles)), True)
        for router in self._routers:
            for index, role in enumerate(spec.roles):
                router.add(str(index), role=ROLES[role])
        self._booked: dict[str, tuple[KvistRouter, int]] = {}

    @property
    def booked(self) -> int:
        """Bookings that are open."""
        return sum(router.booked for router in self._routers)

    @property
    def held(self) -> int:
        """Requests that wait at gateways."""
        return len(self._came_s)

    def choose(self, ask: Ask, cluster: ClusterView) -> Placement | Refusal | None:
        """See `Router`."""
        self._directory.cluster = cluster
        self._notice(cluster)
        number = 0
        if len(self._routers) > 1:
            number = self._stream.randrange(len(self._routers))
        router, queue = self._routers[number], self._queues[number]
        if ask.admitted or (not len(queue) and router.has_room(cluster.now_s)):
            return self._send(router, ask, cluster.now_s)
        need = router.need(ask, queue.work_s, cluster.now_s)
        if isinstance(need, Refused):
            return _REFUSALS[need.reason]
        queue.offer(ask, need, cluster.now_s)
        self._came_s[ask.request] = cluster.now_s
        return None

    def let_on(self, cluster: ClusterView) -> Iterator[tuple[str, Placement | Refusal]]:
        """See `Router`."""
        self._notice(cluster)
        now_s = cluster.now_s
        for router, queue in zip(self._routers, self._queues, strict=True):
            while len(queue) and router.has_room(now_s):
                ask = queue.take()
                assert ask is not None
                waited_s = now_s - self._came_s.pop(ask.request)
                yield ask.request, self._send(router, replace(ask, waited_s=waited_s), now_s)

    def _send(self, router: KvistRouter, ask: Ask, now_s: float) -> Placement | Refusal:
        found = router.choose(ask, now_s)
        if not isinstance(found, Choice):
            return _REFUSALS[found.reason]
        self._booked[ask.request] = router, found.booking
        return Placement(int(found.prefill or found.replica), int(found.replica), found.serve_s)

    def joins(self, request: str) -> Refusal | None:
        """See `Router`."""
        router, booking = self._booked[request]
        return Refusal.TBT_LATE if router.joins(booking) is not None else None

    def first_token(self, request: str, now_s: float) -> None:
        """See `Router`."""
        router, booking = self._booked[request]
        router.first_token(booking, now_s)

    def over(self, request: str, tokens: int, now_s: float, *, failed: bool) -> None:
        """See `Router`."""
        booked = self._booked.pop(request, None)
        if booked is not None:
            router, booking = booked
            router.progress(booking, tokens, now_s)
            router.finish(booking, now_s, failed=failed)

    def _notice(self, cluster: ClusterView) -> None:
        """Tells the routers which nodes have come or gone, and what the others booked."""
        if len(self._routers) > 1 and cluster.now_s - self._exchanged_s >= self._exchange_s:
            self._exchange(cluster.now_s)
        alive = {node.index for node in cluster.nodes()}
        for index, was in self._alive.items():
            if was != (index in alive):
                self._alive[index] = not was
                for router in self._routers:
                    router.set_state(str(index), healthy=not was)

    def _exchange(self, now_s: float) -> None:
        self._exchanged_s = now_s
        reports = [router.report(str(n), now_s) for n, router in enumerate(self._routers)]
        for number, router in enumerate(self._routers):
            for sender, report in enumerate(reports):
                if sender != number:
                    router.hear(report, now_s)


def _speeds(spec: ClusterSpec, block_tokens: int) -> Speeds:
    store = spec.store
    loads = store.load is not LoadPolicy.NEVER
    loads = loads and bool(store.dram.capacity_bytes or store.ssd.capacity_bytes)
    loading = Loading(
        TransferTimes(path_seeds(spec)),
        max(1, spec.model.token_bytes),
        block_tokens,
        store.per_load_s,
        store.per_block_s,
    )
    chunked = spec.engine.prefilling is Prefilling.CHUNKED
    return Speeds(
        PrefillTimes(spec.prefill()),
        DecodeTimes(spec.decode()),
        block_tokens,
        loading if loads else None,
        spec.engine.step_tokens if chunked else None,
        spec.hbm_tokens(),
        tbt_s=spec.slo.tbt_s,
    )
