"""Blends: from spans found anywhere to pages that the engine takes for an ordinary prefix.

The life of one is that of a load (`loads.py`): found, leased, brought to DRAM while the engine asks
again, promised, given pages, ordered, reported. Different is that the worker computes: it moves the
keys, repairs what deviates, and fills the tokens between spans. If it cannot, or what it finds
deviates too much, the pages are reported as not loaded and vLLM computes them.

What is registered is text of blocks that this process has offered to the store; whether they are
still there is asked for at every find.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from kvist.accel.blend.budget import RatioChoice, RatioReason
from kvist.accel.blend.choice import choose, loaded_parts
from kvist.accel.blend.spans import FoundSpan, SpanIndex
from kvist.connectors.plan import BlockGeometry
from kvist.connectors.vllm.blend_cost import BlendCost
from kvist.connectors.vllm.blend_plan import BlendLimits, Region, plan_region
from kvist.connectors.vllm.departures import Departures
from kvist.connectors.vllm.messages import BlendJob, BlendNote, RowRun, StepReport
from kvist.connectors.vllm.sequences import Sequence
from kvist.connectors.vllm.stats import Tally
from kvist.connectors.vllm.taint import Taint
from kvist.core.errors import LeaseError, NoSpaceError
from kvist.core.keys import Key
from kvist.core.lease import BlockStore, ReadLease
from kvist.core.outcome import Outcome, Tier

log = logging.getLogger("kvist.vllm")

_MOST_LOOKS = 2048  # at departed blocks before a lookup; what is left over is found stale
_MOST_LEASES = 512  # of one request: more spans than that are not worth their bookkeeping


@dataclass(frozen=True, slots=True)
class BlendKnobs:
    """What the configuration says about blending."""

    most_deviation_ratio: float
    limits: BlendLimits
    deadline_s: float


@dataclass(slots=True)
class Blend:
    """One request's spans on their way."""

    seq: Sequence
    computed: int
    candidates: list[FoundSpan]
    prefix: list[Key]  # blocks of the exact prefix from `first_block` on
    first_block: int
    leases: list[tuple[ReadLease, tuple[Key, ...]]]
    began_s: float
    choice: RatioChoice
    most_wait_s: float
    region: Region | None = None

    def release(self) -> None:
        """Gives every block back."""
        for lease, _ in self.leases:
            lease.release()

    def ready(self) -> bool:
        """Whether no block is on its way any more."""
        return all(lease.ready() for lease, _ in self.leases)

    def slots(self) -> dict[Key, int]:
        """Where the blocks are that have arrived."""
        return {
            key: lease.slot(i)
            for lease, keys in self.leases
            for i, key in enumerate(keys)
            if lease.outcome(i) is Outcome.HIT
        }


@dataclass(slots=True)
class Blends:
    """All blends of one engine. Called by the scheduler's thread, but for `store_event`."""

    store: BlockStore
    geometry: BlockGeometry
    knobs: BlendKnobs
    tally: Tally
    job_id: Callable[[], int]
    taint: Taint
    index: SpanIndex
    departures: Departures
    cost: BlendCost
    clock: Callable[[], float] = time.monotonic
    able: bool = False  # the worker has said that it can
    _offered: dict[str, Blend] = field(default_factory=dict)
    _running: dict[int, Blend] = field(default_factory=dict)  # by job: ordered, not done
    _parked: dict[str, int] = field(default_factory=dict)  # request that waits → its job
    _orders: list[BlendJob] = field(default_factory=list)

    # -- what is cached ----------------------------------------------------------------------

    def register(self, seq: Sequence) -> None:
        """Text of blocks that the store was offered can be found from now on."""
        first, stop = seq.indexed, seq.cursor.next_block
        if stop <= first or seq.request.mm_features:
            return
        size = self.geometry.block_tokens
        tokens = seq.request.all_token_ids[first * size : stop * size]
        keys = seq.chain.keys[first:stop]
        parent = seq.chain.parent(first)
        self.index.store(keys, tokens, size, scope=seq.chain.seed, first_block=first, parent=parent)
        seq.indexed = stop

    def _forget(self) -> None:
        if self.departures.take_cleared():
            self.index.clear()
        gone = [
            key for key in self.departures.take(_MOST_LOOKS) if not len(self.store.match([key]))
        ]
        if gone:
            self.index.forget(gone)

    # -- before the engine allocates ---------------------------------------------------------

    def still(self, seq: Sequence) -> None:
        """The request runs, or ran until now: its blended pages are in use."""
        hashes = seq.request.block_hashes
        for token in (seq.tainted_from, seq.blended_from):
            if token is not None and hashes:
                self.taint.add(hashes[token // self.geometry.page_tokens])

    def marks(self, seq: Sequence, computed_tokens: int) -> None:
        """Notes from which token on the engine's own hit is blended KV."""
        pages = computed_tokens // self.geometry.page_tokens
        page = self.taint.first(seq.request.block_hashes, pages)
        seq.tainted_from = None if page is None else page * self.geometry.page_tokens
        seq.blended_from = None

    def offer(self, seq: Sequence, computed_tokens: int) -> tuple[int | None, bool] | None:
        """As `Loads.offer`; `None`: this request is not blended."""
        if not self.able or seq.no_blend or not self._blendable(seq):
            return None
        req_id = seq.request.request_id
        blend = self._offered.get(req_id)
        if blend is not None and blend.computed != computed_tokens:
            self.withdraw(req_id)
            blend = None
        if blend is None:
            blend = self._lease(seq, computed_tokens)
            if blend is None:
                seq.no_blend = True  # until it runs
                return None
            self._offered[req_id] = blend
        if not blend.ready():
            if self.clock() - blend.began_s < blend.most_wait_s:
                return None, False
            self.tally.add("kvist_loads_cut_off_total", 1)
        return self._promise(seq, blend)

    def _promise(self, seq: Sequence, blend: Blend) -> tuple[int, bool] | None:
        slots = blend.slots()
        size = self.geometry.block_tokens
        run = next((i for i, key in enumerate(blend.prefix) if key not in slots), None)
        blocks = len(blend.prefix) if run is None else run
        exact = (
            max(blend.computed, (blend.first_block + blocks) * size) if blocks else blend.computed
        )
        parts = [part for span in blend.candidates for part in loaded_parts(span, slots)]
        blend.region = self._region(seq, parts, blend.computed, exact)
        if blend.region is None:
            self.tally.add("kvist_blend_requests_total.unread", 1)
            self.withdraw(seq.request.request_id)
            seq.no_blend = True
            return None
        return blend.region.stop - blend.computed, True

    def _region(
        self, seq: Sequence, parts: list[FoundSpan], computed: int, exact: int
    ) -> Region | None:
        return plan_region(
            parts,
            prompt_tokens=seq.request.num_tokens,
            computed_tokens=computed,
            exact_tokens=exact,
            page_tokens=self.geometry.page_tokens,
            limits=self.knobs.limits,
        )

    def _lease(self, seq: Sequence, computed: int) -> Blend | None:
        self._forget()
        tokens = seq.request.all_token_ids
        keys = seq.chain.extend(tokens)
        first = computed // self.geometry.block_tokens
        prefix = keys[first : first + len(self.store.match(keys[first:]))]
        exact = max(computed, (first + len(prefix)) * self.geometry.block_tokens)
        if seq.request.num_tokens - exact <= self.knobs.limits.min_tokens:
            return None
        found = self.index.find(tokens, scope=seq.chain.seed, skip_tokens=exact)
        tiers = self._tiers(found)
        parts = [part for span in found for part in loaded_parts(span, tiers)]
        region = self._region(seq, parts, computed, exact)
        if region is None:
            return None
        needed = dict.fromkeys(key for span in region.spans for key in span.keys)
        choice = self.cost.choose(region, [tiers[key] for key in needed])
        if choice.ratio >= 1 and choice.reason is RatioReason.RECOMPUTE_FASTER:
            self.tally.add("kvist_blend_requests_total.recompute_faster", 1)
            return None
        wanted = choose(parts, prefix_tokens=exact)
        spare = [p for p in parts if all(tiers[key] is Tier.DRAM for key in p.keys)]
        wait_s = self.cost.most_wait_s(choice)
        blend = Blend(seq, computed, found, list(prefix), first, [], self.clock(), choice, wait_s)
        for run in [tuple(prefix), *(s.keys for s in wanted), *(s.keys for s in spare)]:
            self._read(blend, run, seq.tenant)
        return blend

    def _tiers(self, spans: Seq[FoundSpan]) -> dict[Key, Tier]:
        """Where each block of the candidates is now, of those that are anywhere."""
        found: dict[Key, Tier] = {}
        looked: set[Key] = set()
        for span in spans:
            keys = [key for key in span.keys if key not in looked]
            looked.update(keys)
            while keys:  # run after run: a node is asked once for each
                tiers = self.store.match(keys).tiers
                found.update(zip(keys, tiers, strict=False))
                keys = keys[len(tiers) + 1 :]
        return found

    def _read(self, blend: Blend, keys: tuple[Key, ...], tenant: str) -> None:
        """Leases one run of blocks, unless all of them are leased already."""
        have = {key for _, leased in blend.leases for key in leased}
        if not keys or len(blend.leases) >= _MOST_LEASES or have.issuperset(keys):
            return
        try:
            lease = self.store.read(keys, deadline_s=self.knobs.deadline_s, tenant=tenant)
        except NoSpaceError:
            self.tally.add("kvist_no_space_total", 1)
            return
        blend.leases.append((lease, keys))

    def _blendable(self, seq: Sequence) -> bool:
        """Only text: no images, whose tokens say nothing; no adapters, which we do not apply.

        And only if the engine names its pages one by one, or keeps none for later.
        """
        request = seq.request
        pages = request.num_tokens // self.geometry.page_tokens
        named = len(request.block_hashes) in (0, pages)
        return named and not request.mm_features and request.lora_request is None

    def withdraw(self, req_id: str) -> None:
        """Gives up blocks that the engine did not take up."""
        blend = self._offered.pop(req_id, None)
        if blend is not None:
            blend.release()

    def wait_for_arrival(self, timeout_s: float) -> bool:
        """Waits for a block of some request; false if nothing is on its way."""
        for blend in self._offered.values():
            for lease, keys in blend.leases:
                if not lease.ready():
                    lease.wait(len(keys) - 1, timeout_s=timeout_s)
                    return True
        return False

    # -- once it has -------------------------------------------------------------------------

    def start(self, seq: Sequence, table: Seq[int], computed: int, external: int) -> bool:
        """The engine gave the request pages; orders the work. False if this was no blend.

        Raises:
            LeaseError: other pages than were promised for.
        """
        req_id = seq.request.request_id
        blend = self._offered.get(req_id)
        if blend is None:
            return False
        region = blend.region
        if region is None or (region.computed, region.stop) != (computed, computed + external):
            raise LeaseError(f"request {req_id} was promised another region")
        job = self.job_id()
        self._orders.append(self._order(job, seq, blend, region, table))
        del self._offered[req_id]
        self._running[job] = blend
        self._parked[req_id] = job
        seq.blended_from = region.exact
        self.still(seq)
        return True

    def _order(
        self, job: int, seq: Sequence, blend: Blend, region: Region, table: Seq[int]
    ) -> BlendJob:
        slots, size = blend.slots(), self.geometry.block_tokens
        runs = [
            RowRun(s.start, s.stop, s.source_start, s.first_row, tuple(slots[k] for k in s.keys))
            for s in region.spans
        ]
        if region.exact > region.computed:
            blocks = region.exact // size - blend.first_block
            held = tuple(slots[key] for key in blend.prefix[:blocks])
            at = region.computed
            runs.insert(0, RowRun(at, region.exact, at, at - blend.first_block * size, held))
        pages = table[: region.stop // self.geometry.page_tokens]
        return BlendJob(
            job_id=job,
            req_id=seq.request.request_id,
            tokens=tuple(seq.request.all_token_ids[: region.stop]),
            computed_tokens=region.computed,
            exact_tokens=region.exact,
            runs=tuple(runs),
            pages=tuple(pages),
            ratio=blend.choice.ratio,
            most_deviation_ratio=self.knobs.most_deviation_ratio,
        )

    def refuse(self, req_id: str) -> None:
        """A promise cannot be kept: lets go of everything of this request."""
        self.withdraw(req_id)
        blend = self._running.pop(self._parked.pop(req_id, 0), None)
        if blend is not None:
            blend.release()
            self._give_up(blend)
        self._orders = [order for order in self._orders if order.req_id != req_id]

    def orders(self) -> list[BlendJob]:
        """What the worker should compute in this step."""
        orders, self._orders = self._orders, []
        return orders

    def heard(self, report: StepReport) -> None:
        """The worker has finished blends, well or badly."""
        if report.can_blend is not None:
            self.able = report.can_blend
        for job in report.done:
            blend = self._running.pop(job, None)
            if blend is not None:
                blend.release()
                self._ended(blend, report.blends.get(job))

    def _ended(self, blend: Blend, note: BlendNote | None) -> None:
        if note is None:
            self._give_up(blend)
            return
        if not note.blended:  # what the worker has written is the KV of a whole pass
            blend.seq.blended_from = None
            self.tally.add("kvist_blend_requests_total.deviates", 1)
            return
        self.cost.observe(blend.choice, note.seconds)
        region = blend.region
        tokens = region.span_tokens if region is not None else 0
        self.tally.add("kvist_blend_requests_total.blended", 1)
        self.tally.add("kvist_blended_tokens_total", tokens)
        self.tally.add("kvist_repaired_tokens_total", note.repaired_tokens)
        log.debug(
            "request %s: %d tokens of spans, %d of them repaired, deviation %.3g, in %.3g s",
            blend.seq.request.request_id,
            tokens,
            note.repaired_tokens,
            note.deviation_ratio,
            note.seconds,
        )

    def _give_up(self, blend: Blend) -> None:
        """vLLM computes it all: nothing of it is blended."""
        blend.seq.blended_from = None
        blend.seq.no_blend = True
        self.tally.add("kvist_blend_requests_total.failed", 1)

    def received(self, req_id: str) -> None:
        """The engine has heard that a request's wait is over."""
        self._parked.pop(req_id, None)

    def abandon(self, req_id: str) -> bool:
        """The request is over; true if it was waiting for the worker, which must still report."""
        self.withdraw(req_id)
        return req_id in self._parked

    def busy(self) -> bool:
        """Whether any blend is under way."""
        return bool(self._running or self._orders or self._parked)
