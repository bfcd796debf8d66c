"""The cache below HBM of a whole cluster: tier pools, who holds what, and saving.

When a prompt was computed, its full blocks are offered to DRAM and SSD at once, as `kvist replay`
does; those that enter are sent over the node's links and can be matched when their bytes are
there. A block that came through DRAM to be loaded needs no second copy. In a pool that spans the
cluster a block is held by the node that computed it, and capacities add up.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvist.core.errors import ConfigError
from kvist.core.keys import Key
from kvist.core.outcome import Tier
from kvist.cost.transfer import PathSpeed, TransferTimes
from kvist.sim.contenders import NAMES, contender
from kvist.sim.des.kernel import Action, Kernel
from kvist.sim.des.links import Flow, Link, LinkKind, Network
from kvist.sim.des.pools import TierPool
from kvist.sim.des.sequence import Sequence
from kvist.sim.des.spec import ClusterSpec, Scope, TierSpec
from kvist.sim.traces import Trace

MAX_OPEN_WRITES = 64  # of one node to its SSD; what comes beyond is not written
_ORACLES = ("belady",)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a block would be loaded from: `tier` as the reader sees it, `medium` of `node`."""

    tier: Tier
    medium: Tier
    node: int


_Entered = list[tuple[Tier, list[Key]]]  # blocks on their way into a pool
_Holders = dict[Key, dict[int, None]]  # nodes by block, in order of coming


def path_seeds(spec: ClusterSpec) -> dict[str, PathSpeed]:
    """What a node believes of the way from each tier before it has loaded anything."""
    host, links = spec.host_bytes_per_s(), spec.links
    disk = min(host, links.ssd_read_bytes_per_s)
    return {
        Tier.DRAM.value: PathSpeed(links.host_latency_s, host),
        Tier.SSD.value: PathSpeed(links.ssd_latency_s + links.host_latency_s, disk),
        Tier.REMOTE.value: PathSpeed(links.nic_latency_s, spec.nic_bytes_per_s()),
    }


class _Places:
    """Sources on one node, for itself and for others; each is one object: a plan names hundreds."""

    __slots__ = ("far_dram", "far_ssd", "own_dram", "own_ssd")

    def __init__(self, node: int) -> None:
        self.own_dram = Source(Tier.DRAM, Tier.DRAM, node)
        self.own_ssd = Source(Tier.SSD, Tier.SSD, node)
        self.far_dram = Source(Tier.REMOTE, Tier.DRAM, node)
        self.far_ssd = Source(Tier.REMOTE, Tier.SSD, node)


class NodeStore:
    """What of the store is one node's: links, pools (its own or the cluster's), and speeds."""

    __slots__ = ("dram", "index", "links", "open_writes", "saves", "ssd", "times")

    def __init__(self, index: int, spec: ClusterSpec) -> None:
        host, nic = spec.host_bytes_per_s(), spec.nic_bytes_per_s()
        links, scale = spec.links, LinkKind
        speeds = {
            scale.H2D: (host, links.host_latency_s),
            scale.D2H: (host, links.host_latency_s),
            scale.NIC_IN: (nic, 0.0),
            scale.NIC_OUT: (nic, links.nic_latency_s),
            scale.SSD_READ: (links.ssd_read_bytes_per_s, links.ssd_latency_s),
            scale.SSD_WRITE: (links.ssd_write_bytes_per_s, links.ssd_latency_s),
        }
        self.index = index
        self.links = {kind: Link(kind, index, *speed) for kind, speed in speeds.items()}
        self.times = TransferTimes(path_seeds(spec))
        self.dram: TierPool | None = None
        self.ssd: TierPool | None = None
        self.open_writes = 0
        self.saves: dict[Flow, _Entered] = {}

    def pool(self, medium: Tier) -> TierPool | None:
        """The pool on `medium` that this node writes to."""
        return self.dram if medium is Tier.DRAM else self.ssd


class Store:
    """All nodes' pools and the directory of what can be matched."""

    def __init__(self, kernel: Kernel, network: Network, spec: ClusterSpec, trace: Trace) -> None:
        """Pools as `spec` asks for.

        Raises:
            ConfigError: an eviction order that is unknown, or that cannot be simulated.
        """
        self.scope = spec.store.scope
        self.block_tokens = trace.block_tokens
        self.block_bytes = max(1, spec.model.token_bytes * trace.block_tokens)
        self.nodes = [NodeStore(i, spec) for i in range(len(spec.roles))]
        self.written_blocks = 0  # to SSD
        self.dropped_blocks = 0
        self._kernel = kernel
        self._network = network
        self._dram_holders: _Holders = {}
        self._ssd_holders: _Holders = {}
        self._places = [_Places(node.index) for node in self.nodes]
        self._trace = trace
        self._make_pools(Tier.DRAM, spec.store.dram)
        self._make_pools(Tier.SSD, spec.store.ssd)
        self.exists = any(n.dram is not None or n.ssd is not None for n in self.nodes)

    def _make_pools(self, medium: Tier, tier: TierSpec) -> None:
        if tier.policy not in NAMES or tier.policy in _ORACLES:
            raise ConfigError(
                f"unknown order {tier.policy!r}",
                path=f"$.store.{medium.value}.policy",
                remedy=f"take {', '.join(n for n in NAMES if n not in _ORACLES)}",
            )
        blocks = tier.capacity_bytes // self.block_bytes
        if not blocks:
            return
        shared: TierPool | None = None
        for node in self.nodes:
            if self.scope is not Scope.GLOBAL:
                pool = self._pool(medium, tier, blocks, node.index)
            else:
                if shared is None:
                    shared = self._pool(medium, tier, blocks * len(self.nodes), None)
                pool = shared
            if medium is Tier.DRAM:
                node.dram = pool
            else:
                node.ssd = pool

    def _pool(self, medium: Tier, tier: TierSpec, blocks: int, node: int | None) -> TierPool:
        holders = self._held_on(medium)

        def gone(key: Key) -> None:
            found = holders.get(key)
            if found is None:
                return
            if node is not None:
                found.pop(node, None)
            if node is None or not found:
                del holders[key]

        return TierPool(contender(tier.policy, self._trace, blocks), blocks, gone)

    def _held_on(self, medium: Tier) -> _Holders:
        return self._dram_holders if medium is Tier.DRAM else self._ssd_holders

    def locate(self, key: Key, node: int, near: int = -1) -> Source | None:
        """The nearest place of a block for `node`; of peers, `near` if it is one that has it."""
        on_dram, on_ssd = self._dram_holders.get(key), self._ssd_holders.get(key)
        if on_dram and node in on_dram:
            return self._places[node].own_dram
        if on_ssd and node in on_ssd:
            return self._places[node].own_ssd
        if self.scope is Scope.LOCAL:
            return None
        if on_dram:
            return self._places[near if near in on_dram else next(iter(on_dram))].far_dram
        if on_ssd:
            return self._places[near if near in on_ssd else next(iter(on_ssd))].far_ssd
        return None

    def match(self, node: int, keys: Seq[Key], first: int) -> list[Source]:
        """Places of the longest run of blocks from `keys[first]` on."""
        found: list[Source] = []
        near = -1
        for key in itertools.islice(keys, first, None):
            source = self.locate(key, node, near)
            if source is None:
                break
            near = source.node
            found.append(source)
        return found

    def held_blocks(self, node: int, keys: Seq[Key], first: int) -> tuple[int, int]:
        """Blocks from the root that `node` has in HBM (the first ones) or tiers of its own.

        Returns:
            All of them, and how many are on its SSD only.
        """
        dram, ssd = self._dram_holders, self._ssd_holders
        count, on_ssd = first, 0
        for key in itertools.islice(keys, first, None):
            if node not in dram.get(key, ()):
                if node not in ssd.get(key, ()):
                    break
                on_ssd += 1
            count += 1
        return count, on_ssd

    def reachable_blocks(self, keys: Seq[Key]) -> int:
        """Blocks from the root that stand in a tier of any node."""
        dram, ssd = self._dram_holders, self._ssd_holders
        for count, key in enumerate(keys):
            if key not in dram and key not in ssd:
                return count
        return len(keys)

    def save(self, sequence: Sequence, loaded: frozenset[Key]) -> None:
        """Offers the blocks of a prompt that was computed; `loaded` came through DRAM."""
        keys, node = sequence.keys, self.nodes[sequence.node]
        if not keys or not self.exists:
            return
        now_s = self._kernel.now_s
        to_dram: list[Key] = []
        if node.dram is not None:
            to_dram = node.dram.offer(keys, sequence.hints, now_s)
        to_ssd: list[Key] = []
        if node.ssd is not None:
            if node.open_writes < MAX_OPEN_WRITES:
                to_ssd = node.ssd.offer(keys, sequence.hints, now_s)
            else:
                on_ssd = self._ssd_holders
                self.dropped_blocks += sum(key not in on_ssd for key in keys)
        on_dram = self._dram_holders
        here = [k for k in dict.fromkeys((*to_dram, *to_ssd))
                if k not in loaded and node.index not in on_dram.get(k, ())]  # fmt: skip
        if not here:
            self._in_dram(node, to_dram, to_ssd)
            return
        self._send(node, (LinkKind.D2H,), len(here), [(Tier.DRAM, to_dram), (Tier.SSD, to_ssd)],
                   lambda: self._in_dram(node, to_dram, to_ssd))  # fmt: skip

    def _in_dram(self, node: NodeStore, to_dram: list[Key], to_ssd: list[Key]) -> None:
        self._arrived(node, Tier.DRAM, to_dram)
        if not to_ssd:
            return
        node.open_writes += 1
        self._send(node, (LinkKind.SSD_WRITE,), len(to_ssd), [(Tier.SSD, to_ssd)],
                   lambda: self._on_ssd(node, to_ssd))  # fmt: skip

    def _on_ssd(self, node: NodeStore, keys: list[Key]) -> None:
        node.open_writes -= 1
        self.written_blocks += len(keys)
        self._arrived(node, Tier.SSD, keys)

    def _send(
        self, node: NodeStore, kinds: tuple[LinkKind, ...], blocks: int,
        entered: _Entered, then: Action,
    ) -> None:  # fmt: skip
        def done() -> None:
            del node.saves[flow]
            then()

        links = [node.links[kind] for kind in kinds]
        flow = self._network.start(links, blocks * self.block_bytes, done)
        node.saves[flow] = entered

    def _arrived(self, node: NodeStore, medium: Tier, keys: list[Key]) -> None:
        pool, holders = node.pool(medium), self._held_on(medium)
        if pool is None:
            return
        for key in keys:
            pool.arrived(key)
            holders.setdefault(key, {})[node.index] = None

    def lose(self, index: int) -> None:
        """Forgets all that a node holds or is about to."""
        node = self.nodes[index]
        for flow, entered in node.saves.items():
            self._network.cancel(flow)
            for medium, keys in entered:
                pool = node.pool(medium)
                if pool is not None:
                    for key in keys:
                        pool.lost(key)
        node.saves.clear()
        node.open_writes = 0
        for medium, holders in ((Tier.DRAM, self._dram_holders), (Tier.SSD, self._ssd_holders)):
            pool = node.pool(medium)
            if pool is not None:
                pool.drop([key for key, found in holders.items() if index in found])
