"""Loads: from a match to pages that the engine can use.

`match` finds a run of blocks and `read` leases them; while their bytes come up to DRAM the engine
is told to ask again. Only blocks that are in DRAM with their checksum proven are ever promised, so
a slow or broken medium costs a recompute and never a request. Then the engine allocates pages and
parks the request until the workers have copied the blocks there.

How much of a match is asked for at all is planned (`appraiser.py`); a load that turns out slower
than computing is cut off, and what has arrived by then is promised.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from kvist.connectors.appraiser import Appraisal, Appraiser
from kvist.connectors.plan import BlockGeometry, LoadSpan, load_span
from kvist.connectors.vllm.messages import CopyJob, StepReport
from kvist.connectors.vllm.sequences import Sequence
from kvist.connectors.vllm.stats import Tally
from kvist.core.errors import LeaseError, NoSpaceError
from kvist.core.keys import Key
from kvist.core.lease import BlockStore, ReadLease
from kvist.core.outcome import Match, Tier

log = logging.getLogger("kvist.vllm")


@dataclass(slots=True)
class Load:
    """Blocks on their way to one request."""

    span: LoadSpan
    lease: ReadLease
    tiers: tuple[Tier, ...]
    appraisal: Appraisal
    began_s: float
    alone: bool  # all in DRAM already, and the engine computed nothing meanwhile
    hits: int = 0
    by_tier: dict[Tier, int] = field(default_factory=dict)
    ranks: int = 0
    failed: bool = False


@dataclass(frozen=True, slots=True)
class LoadKnobs:
    """What the configuration says about loading."""

    enabled: bool
    min_tokens: int
    deadline_s: float
    handover_s: float = 1.0


@dataclass(slots=True)
class Loads:
    """All loads of one engine."""

    store: BlockStore
    geometry: BlockGeometry
    knobs: LoadKnobs
    block_bytes: int
    world_size: int
    tally: Tally
    job_id: Callable[[], int]
    appraiser: Appraiser
    clock: Callable[[], float] = time.monotonic
    _offered: dict[str, Load] = field(default_factory=dict)  # leased, no pages yet
    _copying: dict[int, Load] = field(default_factory=dict)  # by job: ordered, not done
    _parked: dict[str, int] = field(default_factory=dict)  # request that waits → its job
    _orders: list[CopyJob] = field(default_factory=list)

    # -- before the engine allocates --------------------------------------------------------

    def offer(self, seq: Sequence, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed_tokens` that can be loaded, and whether the request must wait.

        `None` for tokens: blocks are still on their way to DRAM, ask again.
        """
        if seq.no_load or not self.knobs.enabled:
            return 0, False
        req_id = seq.request.request_id
        load = self._offered.get(req_id)
        if load is not None and computed_tokens < load.span.first * self.geometry.block_tokens:
            self.withdraw(req_id)  # the engine lost blocks that the lease does not cover
            load = None
        if load is None:
            load = self._lease(seq, computed_tokens)
            if load is None:
                return 0, False
            self._offered[req_id] = load
        if not load.lease.ready():
            if not load.appraisal.behind(load.lease.hits(), self.clock() - load.began_s):
                return None, False
            self.tally.add("kvist_loads_cut_off_total", 1)
            log.debug("request %s: its load fell behind and is cut off", req_id)
        return self._promise(seq, load, computed_tokens)

    def _promise(self, seq: Sequence, load: Load, computed_tokens: int) -> tuple[int, bool]:
        load.hits = load.lease.hits()
        self.tally.add("kvist_misses_total.unread", len(load.tiers) - load.hits)
        gain = self._end(load) - computed_tokens
        if gain < max(1, self.knobs.min_tokens):
            self.withdraw(seq.request.request_id)
            seq.no_load = True  # until it runs: the same blocks would fail again
            return 0, False
        return gain, True

    def withdraw(self, req_id: str) -> None:
        """Gives up blocks that the engine did not take up."""
        load = self._offered.pop(req_id, None)
        if load is not None:
            load.lease.release()

    def _end(self, load: Load) -> int:
        return (load.span.first + load.hits) * self.geometry.block_tokens

    def _lease(self, seq: Sequence, computed_tokens: int) -> Load | None:
        tokens = seq.request.all_token_ids
        keys = seq.chain.extend(tokens)
        # a load may cover the whole prompt: vLLM steps back one token itself
        span = load_span(len(tokens), computed_tokens, self.geometry, leave_tokens=0)
        if not span.blocks:
            return None
        match = self.store.match(keys[span.first : span.last])
        self.tally.add("kvist_blocks_queried_total", span.blocks)
        self.tally.add("kvist_blocks_matched_total", len(match))
        if not len(match):
            return None
        run = keys[span.first : span.first + len(match)]
        appraisal = self._probed(run, match, self._appraise(match, len(tokens), computed_tokens))
        decision = appraisal.decision
        self.tally.add(f"kvist_load_decisions_total.{decision.reason.value}", 1)
        log.debug(
            "request %s: %s, %d of %d blocks in %.3g s, %.3g s without",
            seq.request.request_id,
            decision.reason.value,
            decision.load_blocks,
            len(match),
            decision.predicted_s,
            decision.recompute_s,
        )
        if not decision.load_blocks:
            seq.no_load = True  # until it runs: the answer would be the same
            return None
        tiers = match.tiers[: decision.load_blocks]
        lease = self._reserve(run[: len(tiers)], tiers, seq.tenant)
        if lease is None:
            return None
        return Load(span, lease, tiers[: len(lease)], appraisal, self.clock(), lease.ready())

    def _probed(self, run: Seq[Key], match: Match, appraisal: Appraisal) -> Appraisal:
        """`appraisal`, or now and then a probe of what it decided against."""
        probe = self.appraiser.probe(match, appraisal.decision, self.clock())
        if probe is None:
            return appraisal
        if probe.wished_blocks:
            self.store.prefetch(run[: probe.wished_blocks], deadline_s=self.knobs.deadline_s)
        return probe.appraisal if probe.appraisal.decision.load_blocks else appraisal

    def _appraise(self, match: Match, prompt_tokens: int, computed_tokens: int) -> Appraisal:
        """What is to be loaded, as things stand now."""
        self.appraiser.read(self.store.read_totals())
        missing = [load.tiers[load.lease.hits() :] for load in self._offered.values()]
        queued = {
            tier: self.block_bytes * sum(tiers.count(tier) for tiers in missing)
            for tier in (Tier.SSD, Tier.PEER, Tier.REMOTE)
        }
        return self.appraiser.plan(
            match,
            prompt_tokens=prompt_tokens,
            computed_tokens=computed_tokens,
            queued_bytes=queued,
        )

    def _reserve(self, keys: Seq[Key], tiers: Seq[Tier], tenant: str) -> ReadLease | None:
        """Leases the longest run that DRAM can hold now; blocks in DRAM need no new slot."""
        count = _fitting(tiers, self.store.room_blocks(tenant))
        while count:
            try:
                return self.store.read(
                    keys[:count], deadline_s=self.knobs.deadline_s, tenant=tenant
                )
            except NoSpaceError:
                self.tally.add("kvist_no_space_total", 1)
                count //= 2
        return None

    def wait_for_arrival(self, timeout_s: float) -> bool:
        """Waits until some request's blocks are all in DRAM; false if none is waited for.

        The scheduler's thread sleeps here while the store's threads read. In a step it would spin
        for the workers' answer and take the interpreter lock from them.
        """
        for load in self._offered.values():
            if not load.lease.ready():
                load.lease.wait(len(load.lease) - 1, timeout_s=timeout_s)
                return True
        return False

    # -- once it has ------------------------------------------------------------------------

    def start(
        self, seq: Sequence, table: Seq[int], computed_tokens: int, external_tokens: int
    ) -> None:
        """The engine gave the request pages for what was promised; orders the copy.

        Raises:
            LeaseError: nothing was promised.
        """
        req_id = seq.request.request_id
        load = self._offered.pop(req_id, None)
        if load is None:
            raise LeaseError(f"request {req_id} was promised no blocks")
        job = self.job_id()
        self._copying[job] = load
        self._parked[req_id] = job
        bt = self.geometry.block_tokens
        end = computed_tokens + external_tokens
        blocks = range(computed_tokens // bt, -(-end // bt))
        pages = tuple(tuple(self.geometry.page_row(b, table, computed_tokens)) for b in blocks)
        slots = tuple(load.lease.slot(b - load.span.first) for b in blocks)
        self._orders.append(CopyJob(job, req_id, slots, pages))
        load.by_tier = self._by_tier(load, blocks, external_tokens)
        seq.loaded = dict(load.by_tier)

    def refuse(
        self, req_id: str, table: Seq[int], computed_tokens: int, external_tokens: int
    ) -> None:
        """A promise cannot be kept at all: have the workers report its pages as not loaded.

        vLLM waits for a report; without one the request would hang.
        """
        size = self.geometry.page_tokens
        first, last = computed_tokens // size, (computed_tokens + external_tokens) // size
        job = self._parked.pop(req_id, None) or self.job_id()
        load = self._copying.pop(job, None)
        if load is not None:
            load.lease.release()
        self._orders.append(CopyJob(job, req_id, (), (), lost=tuple(table[first:last])))

    def _by_tier(self, load: Load, blocks: range, tokens: int) -> dict[Tier, int]:
        found: dict[Tier, int] = {}
        for block in reversed(blocks):
            share = min(tokens, self.geometry.block_tokens)
            tier = load.tiers[block - load.span.first]
            found[tier] = found.get(tier, 0) + share
            tokens -= share
        return found

    def orders(self) -> list[CopyJob]:
        """What the workers should copy in this step."""
        orders, self._orders = self._orders, []
        return orders

    def heard(self, report: StepReport) -> None:
        """Ranks have finished copies; let go of what all of them have."""
        for job, ranks in report.done.items():
            load = self._copying.get(job)
            if load is None:
                continue
            load.ranks += ranks
            load.failed |= job in report.failed
            if load.ranks >= self.world_size:
                del self._copying[job]
                load.lease.release()
                self._count(load)

    def _count(self, load: Load) -> None:
        if load.failed:
            self.tally.add("kvist_misses_total.copy", load.hits)
            return
        for tier, tokens in load.by_tier.items():
            self.tally.add(f"kvist_tokens_loaded_total.{tier.value}", tokens)

    def received(self, req_id: str) -> None:
        """The engine has heard that a request's wait is over."""
        load = self._copying.get(self._parked.pop(req_id, 0))
        if load is not None and load.alone and load.hits and not load.failed:
            copy = self.appraiser.bytes_per_s(Tier.DRAM)
            moved_s = load.hits * self.block_bytes / copy if copy else 0.0
            beside_s = max(0.0, self.clock() - load.began_s - moved_s)
            self.appraiser.overhead.observe(load.hits, beside_s)

    def computing(self) -> None:
        """The engine computes in this step; loads under way are not all that takes time."""
        for load in (*self._offered.values(), *self._copying.values()):
            load.alone = False

    def abandon(self, req_id: str) -> bool:
        """The request is over; true if it was waiting for a copy, which must still be reported."""
        self.withdraw(req_id)
        return req_id in self._parked

    def busy(self) -> bool:
        """Whether any copy is under way."""
        return bool(self._copying or self._orders or self._parked)


def _fitting(tiers: Seq[Tier], room: int) -> int:
    """Length of the longest run that needs at most `room` new slots."""
    for i, tier in enumerate(tiers):
        if tier is not Tier.DRAM:
            if room == 0:
                return i
            room -= 1
    return len(tiers)
