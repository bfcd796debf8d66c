"""A store, requests and scheduler outputs that a test can steer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any, Self

from kvist.accel.blend.spans import SpanIndex
from kvist.connectors.appraiser import Appraiser
from kvist.connectors.plan import BlockGeometry
from kvist.connectors.vllm.blend_cost import BlendCost
from kvist.connectors.vllm.blends import BlendKnobs, Blends
from kvist.connectors.vllm.departures import Departures
from kvist.connectors.vllm.engine_facts import EngineFacts
from kvist.connectors.vllm.event_feed import EventFeed
from kvist.connectors.vllm.loads import LoadKnobs
from kvist.connectors.vllm.messages import StepPlan, StepReport
from kvist.connectors.vllm.saves import SaveKnobs
from kvist.connectors.vllm.scheduler_side import SchedulerSide
from kvist.connectors.vllm.stats import Tally
from kvist.connectors.vllm.taint import Taint
from kvist.core.errors import LeaseError, NoSpaceError
from kvist.core.hints import Hints
from kvist.core.keys import Key
from kvist.core.layout import BlockLayout
from kvist.core.outcome import BlockRef, Match, Outcome, ReadTotals, Tier
from kvist.cost.prefill import PrefillCoefficients
from kvist.tiers.dram import ArenaLocator

BLOCK = 4
SLOT_BYTES = 1000
ARENA = ArenaLocator(1, 2, 1 << 20, 4096)
SEED = PrefillCoefficients(1e-3, 1e-3, 1e-9)  # a token takes a millisecond
TABLE = [10, 11, 12, 13, 14, 15]  # pages of whichever request runs


@dataclass
class FakeLease:
    """Both kinds of lease; blocks from `arrived` on are pending where the store is slow."""

    store: FakeStore
    keys: list[Key]
    there: list[bool]
    arrived: int = 1000
    released: bool = False
    committed: list[int] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.release()

    def __len__(self) -> int:
        return len(self.keys)

    def release(self) -> None:
        if not self.released:
            self.released = True
            self.store.open_leases -= 1

    def ready(self) -> bool:
        return self.arrived >= len(self.keys)

    def outcome(self, i: int) -> Outcome:
        if self.released:
            return Outcome.MISS
        if i >= self.arrived:
            return Outcome.PENDING
        return Outcome.HIT if self.there[i] else Outcome.MISS

    def wait(self, i: int, *, timeout_s: float | None = None) -> Outcome:
        self.store.waited.append((i, timeout_s))
        return self.outcome(i)

    def hits(self) -> int:
        run = next((i for i, hit in enumerate(self.there) if not hit), len(self.there))
        return min(run, self.arrived)

    def slot(self, i: int) -> int:
        if self.released:
            raise LeaseError("released")
        return self.store.slot_of(self.keys[i])

    def buffer(self, i: int) -> memoryview:
        raise LeaseError("no bytes here")

    def present(self, i: int) -> bool:
        return self.there[i]

    def commit(self, i: int, *, checksum: int | None = None) -> bool:
        if self.released:
            raise LeaseError("released")
        self.store.checksums[self.keys[i]] = checksum
        self.committed.append(i)
        self.store.blocks[self.keys[i]] = Tier.DRAM
        return True


class FakeStore:
    """Blocks by key and tier; no bytes."""

    def __init__(self) -> None:
        self.blocks: dict[Key, Tier] = {}
        self.checksums: dict[Key, int | None] = {}
        self.room = 100
        self.full = False  # NoSpaceError at the next reservation
        self.slow = False  # blocks are pending until the test moves `arrived`
        self.waited: list[tuple[int, float | None]] = []
        self.lost = -1  # from this block on, a read misses what match promised
        self.open_leases = 0
        self.tenants: list[str] = []  # of every read, and of every block of a write
        self.ends: list[tuple[list[Key], Hints]] = []
        self.deaf = False  # `ended` fails
        self.reads: list[FakeLease] = []
        self.writes: list[FakeLease] = []
        self.totals: dict[Tier, ReadTotals] = {}
        self.wishes: list[list[Key]] = []
        self._slots: dict[Key, int] = {}

    def slot_of(self, key: Key) -> int:
        return self._slots.setdefault(key, len(self._slots) * SLOT_BYTES)

    def match(self, keys: Sequence[Key]) -> Match:
        tiers = []
        for key in keys:
            if key not in self.blocks:
                break
            tiers.append(self.blocks[key])
        return Match(tuple(tiers))

    def read(self, keys: Sequence[Key], *, deadline_s: float, tenant: str = "") -> FakeLease:
        self.tenants.append(tenant)
        if self.full:
            raise NoSpaceError("full")
        hits = [k in self.blocks and not 0 <= self.lost <= i for i, k in enumerate(keys)]
        lease = FakeLease(self, list(keys), hits, arrived=0 if self.slow else 1000)
        self.open_leases += 1
        self.reads.append(lease)
        return lease

    def write(self, blocks: Sequence[BlockRef]) -> FakeLease:
        self.tenants += [block.tenant for block in blocks]
        if self.full:
            raise NoSpaceError("full")
        lease = FakeLease(self, [b.key for b in blocks], [b.key in self.blocks for b in blocks])
        self.open_leases += 1
        self.writes.append(lease)
        return lease

    def room_blocks(self, tenant: str = "") -> int:
        return self.room

    def prefetch(self, keys: Sequence[Key], *, deadline_s: float, tenant: str = "") -> int:
        self.wishes.append(list(keys))
        return 0

    def read_totals(self) -> dict[Tier, ReadTotals]:
        return self.totals

    def ended(self, keys: Sequence[Key], hints: Hints) -> None:
        if self.deaf:
            raise NoSpaceError("deaf")
        self.ends.append((list(keys), hints))


@dataclass
class FakeRequest:
    """What Kvist reads of a vLLM request."""

    request_id: str
    tokens: list[int]
    prompt_tokens: int
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: tuple[Any, ...] = ()
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    status: Any = None
    block_hashes: list[bytes] = field(default_factory=list)

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.tokens[: self.prompt_tokens]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt_tokens


def request(name: str, count: int, *, first: int = 0, **fields: Any) -> FakeRequest:
    """A request whose prompt is `count` consecutive numbers."""
    return FakeRequest(name, list(range(first, first + count)), count, **fields)


def scheduled(
    new: Sequence[tuple[FakeRequest, int, list[int]]] = (),
    cached: Sequence[tuple[FakeRequest, int, list[int]]] = (),
) -> Any:
    """A scheduler output: (request, tokens scheduled now, page table) of each that runs."""
    tables = {r.request_id: (table,) for r, _, table in (*new, *cached)}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r.request_id, num_computed_tokens=r.num_computed_tokens)
            for r, _, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r.request_id for r, _, _ in cached],
            num_computed_tokens=[r.num_computed_tokens for r, _, _ in cached],
        ),
        num_scheduled_tokens={r.request_id: n for r, n, _ in (*new, *cached)},
        total_num_scheduled_tokens=sum(n for _, n, _ in (*new, *cached)),
        kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
    )


class Side:
    """A scheduler side over a `FakeStore`, and the steps of an engine in short."""

    def __init__(
        self,
        *,
        page_tokens: int = BLOCK,
        block_tokens: int = BLOCK,
        ranks: int = 1,
        load: bool = True,
        save: bool = True,
        save_decode: bool = True,
        min_load_tokens: int = 0,
        save_unseen: bool = True,
        blend: BlendKnobs | None = None,
    ) -> None:
        self.store = FakeStore()
        layout = BlockLayout(1, 2, 8, block_tokens, "float32")
        facts = EngineFacts(
            layout, BlockGeometry(block_tokens, page_tokens), bytes(32), ranks, ranks
        )
        appraiser = Appraiser(SEED, block_tokens=block_tokens, block_bytes=layout.block_bytes)
        self.feed = EventFeed(block_tokens, enabled=True)
        self.side = SchedulerSide(
            self.store,  # type: ignore[arg-type]
            lambda: ARENA,
            facts,
            self.feed,
            LoadKnobs(enabled=load, min_tokens=min_load_tokens, deadline_s=1.0),
            SaveKnobs(enabled=save, decode=save_decode, all_blocks=save_unseen),
            appraiser,
            blend=self._blends(blend, facts, appraiser) if blend is not None else None,
        )
        self.block_bytes = layout.block_bytes

    def _blends(
        self, knobs: BlendKnobs, facts: EngineFacts, appraiser: Appraiser
    ) -> Callable[..., Blends]:
        self.now_s = 0.0
        cost = BlendCost(appraiser, 30, 0.15)
        self.index, self.departures, self.taint = SpanIndex(), Departures(), Taint(100)

        def make(tally: Tally, job: Callable[[], int]) -> Blends:
            return Blends(
                self.store,  # type: ignore[arg-type]
                facts.geometry,
                knobs,
                tally,
                job,
                self.taint,
                self.index,
                self.departures,
                cost,
                clock=lambda: self.now_s,
            )

        return make

    def run(self, req: FakeRequest, tokens: int, table: list[int]) -> StepPlan:
        """One step in which only `req` computes `tokens` more."""
        plan = self.side.plan_step(scheduled(new=[(req, tokens, table)]))
        req.num_computed_tokens += tokens
        return plan

    def idle(self) -> StepPlan:
        """A step without a forward pass."""
        return self.side.plan_step(scheduled())

    def done(self, *jobs: int, failed: Sequence[int] = (), ranks: int = 1) -> None:
        """The workers report these jobs, from as many ranks."""
        self.side.heard(StepReport(dict.fromkeys(jobs, ranks), set(failed)), set())

    def save_all(self, req: FakeRequest, table: list[int]) -> None:
        """Serves `req` to its end, all its full blocks saved."""
        self.side.arrive(req)
        plan = self.run(req, len(req.tokens) - req.num_computed_tokens, table)
        self.done(*[job.job_id for job in plan.saves])
        self.side.finish(req, table)


def warm_side() -> Side:
    """A side whose store holds blocks 0 to 2 of the tokens 0, 1, 2 …"""
    side = Side()
    side.save_all(request("writer", 3 * BLOCK), TABLE)
    side.idle()
    assert side.store.open_leases == 0
    return side


def promise(side: Side, req: FakeRequest, computed: int = 0) -> tuple[int | None, bool]:
    """What the engine is told it can load beyond `computed` tokens."""
    return side.side.matched(req, computed)


def load(side: Side, req: FakeRequest, table: Sequence[int] = TABLE) -> StepPlan:
    """A request arrives, is promised blocks and given pages; the first step of its load."""
    side.side.arrive(req)
    tokens, is_async = promise(side, req)
    assert tokens
    assert is_async
    side.side.allocated(req, table, 0, tokens)
    return side.idle()


def end_load(side: Side, req: FakeRequest, job: int) -> None:
    """The only rank reports that the load has ended."""
    side.side.heard(StepReport({job: 1}, set()), {req.request_id})


def learn_prefill(side: Side, passes: int = 20) -> None:
    """The engine computes prompts, a millisecond a token, and the workers say so."""
    for i in range(passes):
        count = BLOCK * (2 + i % 5)
        req = request(f"learn-{i}", count, first=10_000 + 1_000 * i)
        side.side.arrive(req)
        plan = side.run(req, count, TABLE * 3)
        side.done(*[job.job_id for job in plan.saves])
        step = plan.timed
        assert step
        took_s = SEED.prefill_s(count, 0)
        side.side.heard(StepReport(passes={step: took_s}), set())
        side.side.finish(req, TABLE * 3)


def slow_disk(side: Side, seconds_a_block: float) -> None:
    """The store's totals say that its disk brings a block in so long."""
    for blocks in range(1, 30):
        now = ReadTotals(blocks * side.block_bytes, blocks * seconds_a_block)
        side.store.totals = {Tier.SSD: now}
        side.side.appraiser.read(side.store.totals)
