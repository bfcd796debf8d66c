"""Loads: from a match to pages that the engine can use.

`match` finds a run of blocks, `read` leases them, the run is promised to the engine at once, and
blocks are handed to the workers in order as they arrive in DRAM with their checksum proven: copying
the head overlaps reading the tail. A block that does not arrive ends the run there: its pages and
all after them are reported as not loaded, and the engine recomputes from that point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

from kvist.connectors.fallback import Fallback
from kvist.connectors.plan import SKIP_PAGE, BlockGeometry, LoadSpan, load_span
from kvist.connectors.vllm.messages import CopyJob
from kvist.connectors.vllm.sequences import Sequence
from kvist.connectors.vllm.stats import Tally
from kvist.core.errors import LeaseError, NoSpaceError
from kvist.core.keys import Key
from kvist.core.lease import BlockStore, ReadLease
from kvist.core.outcome import Outcome, Tier

_BATCH_BLOCKS = 8  # most blocks in one order while more are coming: keeps reader and copier busy


@dataclass(slots=True)
class Load:
    """Blocks on their way to one request. `sent` counts blocks of `blocks` handed to workers."""

    span: LoadSpan
    lease: ReadLease
    tiers: tuple[Tier, ...]
    blocks: range = range(0)
    pages: tuple[tuple[int, ...], ...] = ()
    computed_tokens: int = 0
    sent: int = 0
    over: bool = False
    unwanted: bool = False

    @property
    def next(self) -> int:
        """Index in the lease of the next block to hand over."""
        return self.blocks.start + self.sent - self.span.first


@dataclass(slots=True)
class LoadKnobs:
    """What the configuration says about loading."""

    enabled: bool
    min_tokens: int
    deadline_s: float


@dataclass(slots=True)
class Loads:
    """All loads of one engine."""

    store: BlockStore
    geometry: BlockGeometry
    knobs: LoadKnobs
    tally: Tally
    fallback: Fallback
    job_id: Callable[[], int]
    _offered: dict[str, Load] = field(default_factory=dict)  # promised, no pages yet
    _copying: dict[str, Load] = field(default_factory=dict)  # pages given, workers not done
    _orders: list[CopyJob] = field(default_factory=list)

    # -- before the engine allocates --------------------------------------------------------

    def offer(self, seq: Sequence, computed_tokens: int) -> int:
        """Tokens beyond `computed_tokens` that can be loaded; leases their blocks."""
        req_id = seq.request.request_id
        load = self._offered.get(req_id)
        if load is not None and not self._covers(load, computed_tokens):
            self.withdraw(req_id)
            load = None
        if load is None and self.knobs.enabled:
            load = self._lease(seq, computed_tokens)
        if load is None:
            return 0
        gain = self._gain(load.span.first + len(load.lease), computed_tokens)
        if gain < max(1, self.knobs.min_tokens):
            load.lease.release()
            self._offered.pop(req_id, None)
            return 0
        self._offered[req_id] = load
        return gain

    def withdraw(self, req_id: str) -> None:
        """Gives up a promise that the engine did not take up."""
        load = self._offered.pop(req_id, None)
        if load is not None:
            load.lease.release()

    def _covers(self, load: Load, computed_tokens: int) -> bool:
        """Whether a lease taken earlier begins where the engine's own blocks end now."""
        return computed_tokens >= load.span.first * self.geometry.block_tokens

    def _gain(self, end_block: int, computed_tokens: int) -> int:
        return end_block * self.geometry.block_tokens - computed_tokens

    def _lease(self, seq: Sequence, computed_tokens: int) -> Load | None:
        tokens = seq.request.all_token_ids
        keys = seq.chain.extend(tokens)
        # an asynchronous load may cover the whole prompt: vLLM steps back one token itself
        span = load_span(len(tokens), computed_tokens, self.geometry, leave_tokens=0)
        if not span.blocks:
            return None
        tiers = self.store.match(keys[span.first : span.last]).tiers
        self.tally.add("kvist_blocks_queried_total", span.blocks)
        self.tally.add("kvist_blocks_matched_total", len(tiers))
        lease = self._reserve(keys[span.first : span.first + len(tiers)], tiers)
        return Load(span, lease, tiers[: len(lease)]) if lease is not None else None

    def _reserve(self, keys: Seq[Key], tiers: Seq[Tier]) -> ReadLease | None:
        """Leases the longest run that DRAM can hold now; blocks in DRAM need no new slot."""
        count = _fitting(tiers, self.store.room_blocks())
        while count:
            try:
                return self.store.read(keys[:count], deadline_s=self.knobs.deadline_s)
            except NoSpaceError:
                self.tally.add("kvist_no_space_total", 1)
                count //= 2
        return None

    # -- once it has ------------------------------------------------------------------------

    def start(
        self, seq: Sequence, table: Seq[int], computed_tokens: int, external_tokens: int
    ) -> None:
        """The engine gave the request pages for what was promised.

        Raises:
            LeaseError: nothing was promised.
        """
        req_id = seq.request.request_id
        load = self._offered.pop(req_id, None)
        if load is None:
            raise LeaseError(f"request {req_id} was promised no blocks")
        bt = self.geometry.block_tokens
        end = computed_tokens + external_tokens
        load.blocks = range(computed_tokens // bt, -(-end // bt))
        load.computed_tokens = computed_tokens
        load.pages = tuple(
            tuple(self.geometry.page_row(b, table, computed_tokens)) for b in load.blocks
        )
        self._copying[req_id] = load
        seq.loaded = self._by_tier(load, external_tokens)

    def refuse(
        self, req_id: str, table: Seq[int], computed_tokens: int, external_tokens: int
    ) -> None:
        """A promise cannot be kept at all: have the workers report its pages as not loaded.

        vLLM waits for a report; without one the request would hang.
        """
        size = self.geometry.page_tokens
        first, last = computed_tokens // size, (computed_tokens + external_tokens) // size
        self._orders.append(CopyJob(self.job_id(), req_id, (), (), tuple(table[first:last])))

    def _by_tier(self, load: Load, tokens: int) -> dict[Tier, int]:
        """`tokens` gained by the blocks handed over so far (or to be), by the tier they were in."""
        found: dict[Tier, int] = {}
        stop = load.blocks.start + load.sent if load.over else load.blocks.stop
        for block in range(stop - 1, load.blocks.start - 1, -1):
            share = min(tokens, self.geometry.block_tokens)
            tier = load.tiers[block - load.span.first]
            found[tier] = found.get(tier, 0) + share
            tokens -= share
        return found

    def orders(self) -> list[CopyJob]:
        """What the workers should copy now. A load's last order ends it, well or badly."""
        for req_id, load in self._copying.items():
            if not load.over:
                self.fallback.rescue(
                    "stream load",
                    partial(self._stream, req_id, load),
                    partial(self._give_up, req_id, load),
                )
        orders, self._orders = self._orders, []
        return orders

    def _stream(self, req_id: str, load: Load) -> None:
        self._orders.extend(self._ready(req_id, load))

    def _ready(self, req_id: str, load: Load) -> Iterator[CopyJob]:
        """Orders for blocks that have arrived since the last call."""
        while not load.over:
            first, outcome = load.sent, Outcome.HIT
            stop = min(len(load.blocks), first + _BATCH_BLOCKS)
            while load.sent < stop and not load.unwanted:
                outcome = load.lease.outcome(load.next)
                if outcome is not Outcome.HIT:
                    break
                load.sent += 1
            failed = outcome is Outcome.MISS
            load.over = failed or load.unwanted or load.sent == len(load.blocks)
            if load.sent == first and not load.over:
                return
            yield self._order(req_id, load, first, failed=failed)
            if outcome is Outcome.PENDING:
                return

    def _order(self, req_id: str, load: Load, first: int, *, failed: bool) -> CopyJob:
        sent = range(first, load.sent)
        base = load.blocks.start - load.span.first
        return CopyJob(
            self.job_id(),
            req_id,
            tuple(load.lease.slot(base + i) for i in sent),
            tuple(load.pages[i] for i in sent),
            self._lost(load) if failed else (),
            more=not load.over,
        )

    def _lost(self, load: Load) -> tuple[int, ...]:
        """Pages that were promised and are not filled, to be recomputed."""
        self.tally.add("kvist_misses_total.unread", len(load.blocks) - load.sent)
        return tuple(p for row in load.pages[load.sent :] for p in row if p != SKIP_PAGE)

    def _give_up(self, req_id: str, load: Load) -> None:
        load.sent, load.over = 0, True
        self._orders.append(CopyJob(self.job_id(), req_id, (), (), self._lost(load)))

    def wait_for_arrival(self, timeout_s: float) -> None:
        """Waits for the next block of any load that is not in DRAM yet."""
        for load in self._copying.values():
            if not load.over:
                load.lease.wait(load.next, timeout_s=timeout_s)
                return

    def received(self, req_id: str) -> None:
        """Every rank is done with a load, or has given it up."""
        load = self._copying.pop(req_id, None)
        if load is None:
            return
        load.lease.release()
        end = (load.blocks.start + load.sent) * self.geometry.block_tokens
        if load.sent:
            for tier, tokens in self._by_tier(load, end - load.computed_tokens).items():
                self.tally.add(f"kvist_tokens_loaded_total.{tier.value}", tokens)

    def abandon(self, req_id: str) -> bool:
        """The request is over; true if its load must still be reported by the workers."""
        self.withdraw(req_id)
        load = self._copying.get(req_id)
        if load is not None:
            load.unwanted = True
        return load is not None

    def busy(self) -> bool:
        """Whether any load is under way."""
        return bool(self._copying or self._orders)


def _fitting(tiers: Seq[Tier], room: int) -> int:
    """Length of the longest run that needs at most `room` new slots."""
    for i, tier in enumerate(tiers):
        if tier is not Tier.DRAM:
            if room == 0:
                return i
            room -= 1
    return len(tiers)
