"""Loading matched blocks: what `cost.plan_load` decides, on links that others use too.

A load has one part for each place that it reads from; the parts run at once. Where its policy is
`planned` it is looked at when it should be done and at its deadline, and is cut off as production
does; what arrived in one run from the start is used, and the rest computed. The speeds that the
plans use are learned from the loads themselves by `TransferTimes`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvist.core.keys import Key
from kvist.core.outcome import Match, Tier
from kvist.cost.plan_load import (
    LoadCosts,
    LoadDecision,
    Overlap,
    Reason,
    fell_behind,
    plan_load,
)
from kvist.cost.transfer import Transfer
from kvist.sim.des.kernel import Event, Kernel
from kvist.sim.des.links import Flow, Link, LinkKind, Network
from kvist.sim.des.sequence import Sequence
from kvist.sim.des.spec import ClusterSpec, LoadPolicy
from kvist.sim.des.store import Source, Store

_LATE_RATIO = 1.05  # of the predicted time; then the load is looked at
_LATER = 1 + 1e-9
_LOADED_FROM = (Tier.DRAM, Tier.SSD, Tier.REMOTE)

LoadAction = Callable[[Sequence], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What was decided of a match: `sources[i]` is where block i of what is to be loaded is."""

    first_block: int  # of the prompt
    sources: tuple[Source, ...]
    decision: LoadDecision
    costs: LoadCosts


class Part:
    """The blocks that one load reads from one place."""

    __slots__ = ("booked", "delay_s", "flow", "moved_bytes", "numbers", "size_bytes", "source")

    def __init__(self, source: Source, numbers: list[int], size_bytes: int, delay_s: float) -> None:
        self.source = source
        self.numbers = numbers  # of the match's blocks
        self.size_bytes = size_bytes
        self.delay_s = delay_s
        self.moved_bytes = 0.0  # by flows that are over
        self.flow: Flow | None = None
        self.booked: Transfer | None = None


class Load:
    """A load under way, or over: `arrived_blocks` is what came of it."""

    __slots__ = (
        "arrived_blocks",
        "checks",
        "open",
        "parts",
        "plan",
        "ready",
        "started_s",
        "waiting_first",
        "waiting_last",
    )

    def __init__(self, plan: Plan, started_s: float) -> None:
        self.plan = plan
        self.started_s = started_s
        self.parts: list[Part] = []
        self.checks: list[Event] = []
        self.arrived_blocks = 0
        self.open = True
        self.ready = False  # the prefill may begin
        self.waiting_first = 0
        self.waiting_last = 0


class Loader:
    """Plans and runs the loads of all nodes."""

    def __init__(self, kernel: Kernel, network: Network, spec: ClusterSpec, store: Store) -> None:
        self.reasons: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self.cut_off = 0
        self.failed = 0
        self._kernel = kernel
        self._network = network
        self._spec = spec
        self._store = store
        self._prefill = spec.prefill()
        self._layers = max(1, spec.model.layers)
        self._open: dict[Sequence, tuple[Load, LoadAction, LoadAction]] = {}

    def plan(self, sequence: Sequence, keys: Seq[Key], hbm_blocks: int) -> Plan | None:
        """What to load for a sequence whose first `hbm_blocks` of `keys` are in HBM.

        None where nothing is asked for, or nothing matched. `decided` counts the plan.
        """
        policy = self._spec.store.load
        if not self._store.exists or policy is LoadPolicy.NEVER:
            return None
        store, node = self._store, self._store.nodes[sequence.node]
        sources = tuple(store.match(sequence.node, keys, hbm_blocks))
        if not sources:
            return None
        costs = LoadCosts(
            prompt_tokens=sequence.prompt_tokens,
            block_tokens=store.block_tokens,
            block_bytes=store.block_bytes,
            prefill=self._prefill,
            paths={tier: node.times.state(tier.value) for tier in _LOADED_FROM},
            computed_tokens=hbm_blocks * store.block_tokens,
            layers=self._layers,
            per_load_s=self._spec.store.per_load_s,
            per_block_s=self._spec.store.per_block_s,
        )
        match = Match(tuple([source.tier for source in sources]))
        decision = plan_load(match, costs, self._spec.store.overlap)
        if policy is LoadPolicy.ALWAYS:
            decision = dataclasses.replace(
                decision, load_blocks=len(sources), recompute_blocks=0, reason=Reason.LOAD_ALL
            )
        return Plan(hbm_blocks, sources[: decision.load_blocks], decision, costs)

    def decided(self, plan: Plan | None) -> None:
        """Counts a plan that is acted on, by its reason."""
        if self._store.exists and self._spec.store.load is not LoadPolicy.NEVER:
            self.reasons[plan.decision.reason if plan else Reason.NOTHING_MATCHED] += 1

    def start(self, sequence: Sequence, plan: Plan, ready: LoadAction, done: LoadAction) -> Load:
        """Begins a load: `ready` is called when the prefill may begin, `done` when all is there.

        Both come in every case, `ready` first; `load.arrived_blocks` then says what can be used.
        """
        load = Load(plan, self._kernel.now_s)
        sequence.load = load
        self._open[sequence] = (load, ready, done)
        store, costs = self._store, self._spec.store
        groups: dict[tuple[Tier, int], list[int]] = {}
        for source, begin, past in _runs(plan.sources):
            groups.setdefault((source.medium, source.node), []).extend(range(begin, past))
        fixed_s = costs.per_load_s
        for numbers in groups.values():
            source = plan.sources[numbers[0]]
            delay_s, fixed_s = fixed_s + costs.per_block_s * len(numbers), 0.0
            part = Part(source, numbers, len(numbers) * store.block_bytes, delay_s)
            self._pin(sequence, part)
            times = store.nodes[sequence.node].times
            part.booked = times.begin(source.tier.value, part.size_bytes)
            load.parts.append(part)
        load.waiting_first = load.waiting_last = len(load.parts)
        layerwise = costs.overlap is Overlap.LAYERWISE and self._layers > 1
        for part in load.parts:
            first = part.size_bytes / self._layers if layerwise else part.size_bytes
            self._flow(sequence, load, part, first, part.delay_s)
        if costs.load is LoadPolicy.PLANNED:
            look = plan.decision.load_s * _LATE_RATIO, plan.decision.cutoff_s * _LATER
            load.checks = [self._kernel.after(s, lambda: self._check(sequence, load)) for s in look]
        return load

    def cancel(self, sequence: Sequence) -> None:
        """Drops a load whose reader is gone; nobody is called."""
        if sequence in self._open:
            self._close(sequence, self._open[sequence][0])

    def lose(self, node: int) -> None:
        """Ends every load that reads from a lost node; what arrived is used."""
        for sequence, (load, _, _) in list(self._open.items()):
            if load.open and any(part.source.node == node for part in load.parts):
                self.failed += 1
                self._stop(sequence, load)

    def keys_through_dram(self, sequence: Sequence) -> frozenset[Key]:
        """Blocks that a finished load brought: they came through the node's DRAM."""
        load = sequence.load
        if not isinstance(load, Load):
            return frozenset()
        first = load.plan.first_block
        return frozenset(sequence.keys[first : first + load.arrived_blocks])

    def loaded_tokens(self, sequence: Sequence) -> dict[str, int]:
        """Tokens that a load brought, or is to bring, by tier as the reader sees it."""
        load = sequence.load
        counts: dict[str, int] = {}
        if isinstance(load, Load):
            blocks = None if load.open else load.arrived_blocks
            for source, begin, past in _runs(load.plan.sources[:blocks]):
                tier = source.tier.value
                counts[tier] = counts.get(tier, 0) + (past - begin) * self._store.block_tokens
        return counts

    def _links(self, reader: int, source: Source) -> list[Link]:
        own, theirs = self._store.nodes[reader].links, self._store.nodes[source.node].links
        links = [theirs[LinkKind.SSD_READ]] if source.medium is Tier.SSD else []
        if source.node == reader:
            return [*links, own[LinkKind.H2D]]
        return [*links, theirs[LinkKind.NIC_OUT], own[LinkKind.NIC_IN]]

    def _flow(
        self, sequence: Sequence, load: Load, part: Part, size_bytes: float, delay_s: float
    ) -> None:
        def done() -> None:
            part.flow = None
            self._part_moved(sequence, load, part, size_bytes)

        links = self._links(sequence.node, part.source)
        part.flow = self._network.start(links, size_bytes, done, delay_s=delay_s)

    def _part_moved(self, sequence: Sequence, load: Load, part: Part, size_bytes: float) -> None:
        first = not part.moved_bytes
        part.moved_bytes += size_bytes
        if first:
            load.waiting_first -= 1
        left = part.size_bytes - part.moved_bytes
        if first and left > 0:
            self._flow(sequence, load, part, left, 0.0)
        else:
            part.moved_bytes = part.size_bytes
            load.waiting_last -= 1
            times, took_s = self._store.nodes[sequence.node].times, self._kernel.now_s
            took_s = max(0.0, took_s - load.started_s - part.delay_s)
            if part.booked is not None:
                times.end(part.booked, took_s)
                part.booked = None
        if not load.waiting_last:
            self._stop(sequence, load)
        elif not load.waiting_first and not load.ready:
            load.ready = True
            self._open[sequence][1](sequence)

    def _check(self, sequence: Sequence, load: Load) -> None:
        if not load.open:
            return
        elapsed_s = self._kernel.now_s - load.started_s
        if fell_behind(load.plan.decision, load.plan.costs, self._arrived(load), elapsed_s):
            self.cut_off += 1
            self._stop(sequence, load)

    def _stop(self, sequence: Sequence, load: Load) -> None:
        """Ends a load, done or not, and tells its reader."""
        _, ready, done = self._open[sequence]
        load.arrived_blocks = self._arrived(load)
        self._close(sequence, load)
        if not load.ready:
            load.ready = True
            ready(sequence)
        if sequence.load is load:  # else the reader gave up when it was ready
            done(sequence)

    def _close(self, sequence: Sequence, load: Load) -> None:
        load.open = False
        del self._open[sequence]
        for event in load.checks:
            self._kernel.cancel(event)
        for part in load.parts:
            if part.flow is not None:
                self._network.cancel(part.flow)
            if part.booked is not None:
                self._store.nodes[sequence.node].times.abandon(part.booked)
                part.booked = None
            self._unpin(sequence, part)

    def _arrived(self, load: Load) -> int:
        """Blocks that are there in one run from the first."""
        block_bytes = self._store.block_bytes
        missing = len(load.plan.sources)
        for part in load.parts:
            moved = part.moved_bytes
            if part.flow is not None:
                moved += self._network.moved_bytes(part.flow)
            there = int(moved * _LATER // block_bytes)
            if there < len(part.numbers):
                missing = min(missing, part.numbers[there])
        return missing

    def _keys(self, sequence: Sequence, part: Part) -> list[Key]:
        load = sequence.load
        assert isinstance(load, Load)
        return [sequence.keys[load.plan.first_block + number] for number in part.numbers]

    def _pin(self, sequence: Sequence, part: Part) -> None:
        pool = self._store.nodes[part.source.node].pool(part.source.medium)
        for key in self._keys(sequence, part):
            if pool is not None:
                pool.pin(key)

    def _unpin(self, sequence: Sequence, part: Part) -> None:
        pool = self._store.nodes[part.source.node].pool(part.source.medium)
        for key in self._keys(sequence, part):
            if pool is not None:
                pool.unpin(key)


def _runs(sources: Seq[Source]) -> Iterator[tuple[Source, int, int]]:
    """Neighbours of one source together, with their first number and the one past their last."""
    first = 0
    for _, run in itertools.groupby(sources, key=id):
        past = first + sum(1 for _ in run)
        yield sources[first], first, past
        first = past
