"""A replica as the router keeps it: its speeds, its bookings, and a view of it for each request."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvist.core.keys import Key
from kvist.cost.decode import DecodeTimes
from kvist.cost.prefill import PrefillTimes
from kvist.router.bookings import Contexts, HeldBlocks, PrefillQueue, Work
from kvist.router.candidates import Known, Load, Prefix
from kvist.router.exchange import OtherGateways, ReplicaLoad
from kvist.router.learning import BusyPeriod
from kvist.router.protocol import Ask
from kvist.router.serving import Loading, Step, beside_decodes_s, serve_s, stalling_s

ROLES = ("both", "prefill", "decode")
MAX_ADAPTERS = 16  # that a replica is believed to keep loaded


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a replica is believed to do in how long.

    Attributes:
        prefill: learned from first tokens.
        decode: of a step.
        block_tokens: tokens of a block.
        loading: how KV comes to it; None where nothing is loaded.
        step_tokens: of a prefill chunk that decodes ride along with; None where prefill runs alone.
        kv_tokens: of KV that its HBM holds; None where that is not known.
        guessed: `decode` began as nobody's measurement; see `decode_load`.
        tbt_s: limit of a step that those who decode are promised.
    """

    prefill: PrefillTimes
    decode: DecodeTimes
    block_tokens: int
    loading: Loading | None = None
    step_tokens: int | None = None
    kv_tokens: int | None = None
    guessed: bool = False
    tbt_s: float = math.inf


class Replica:
    """One engine: state, speeds and bookings of this gateway. The router's lock is held."""

    def __init__(self, name: str, role: str, speeds: Speeds, others: OtherGateways) -> None:
        """Healthy at first.

        Raises:
            ValueError: `role` is not of `ROLES`.
        """
        if role not in ROLES:
            raise ValueError(f"a replica does one of {', '.join(ROLES)}, not {role!r}")
        self.name = name
        self.role = role
        self.speeds = speeds
        self.others = others
        self.healthy = True
        self.draining = False
        self.queue = PrefillQueue()
        self.contexts = Contexts()
        self.blocks = HeldBlocks()
        self._period = BusyPeriod()
        self._adapters: OrderedDict[str, None] = OrderedDict()

    @property
    def open(self) -> bool:
        """Whether it gets new requests."""
        return self.healthy and not self.draining

    def queues(self, booking: int, work: Work, now_s: float) -> None:
        """A prompt to compute."""
        if not len(self.queue):
            self._period.begin(now_s)
        if (
            work.loads
            or not work.seen
            or (self.speeds.step_tokens is not None and self.contexts.live)
        ):
            self._period.spoil()
        self.queue.add(booking, work, now_s)

    def computed(self, booking: int, work: Work, now_s: float, *, done: bool) -> None:
        """A prompt gave its first token, or (`done` is off) was given up."""
        self.queue.remove(booking, now_s)
        if done:
            self._period.computed(work.new_tokens, work.cached_tokens)
        else:
            self._period.spoil()
        if not len(self.queue):
            self._period.end(now_s, self.speeds.prefill)

    def uses(self, lora: str) -> None:
        """Notes that an adapter is used there."""
        if lora:
            self._adapters[lora] = None
            self._adapters.move_to_end(lora)
            if len(self._adapters) > MAX_ADAPTERS:
                self._adapters.popitem(last=False)

    def has(self, lora: str) -> bool:
        """Whether an adapter was used there lately, or none is asked for."""
        return not lora or lora in self._adapters

    def report(self, now_s: float) -> ReplicaLoad:
        """Its bookings, for other gateways."""
        waiting = len(self.queue)
        return ReplicaLoad(
            queue_s=self.queue.left_s(now_s),
            requests=self.requests,
            waiting=waiting,
            prefill_tokens=self.queue.tokens,
            contexts=len(self.contexts),
            context_tokens=self.contexts.tokens,
            blocks=len(self.blocks),
        )

    @property
    def requests(self) -> int:
        """Bookings that concern it."""
        return len(self.queue) if self.role == "prefill" else len(self.contexts)


class View:
    """A replica for one request: `Candidate` from bookings, own and others'."""

    __slots__ = (
        "_ask",
        "_decode_s",
        "_found",
        "_keys",
        "_load",
        "_now_s",
        "_prefix",
        "_queue_s",
        "_replicas",
        "_share",
        "_stays",
        "_theirs",
        "replica",
    )

    def __init__(
        self, replica: Replica, ask: Ask, keys: Sequence[Key], found: Prefix, *,
        replicas: int, stays: bool, now_s: float, decode_s: float,
    ) -> None:  # fmt: skip
        """
        Args:
            keys: of blocks that can spare computing.
            found: what the index says.
            replicas: how many there are.
            stays: whether the session's last request went here.
            decode_s: that a request usually decodes.
        """
        self.replica = replica
        self._ask = ask
        self._keys = keys
        self._found = found
        self._replicas = replicas
        self._stays = stays
        self._now_s = now_s
        self._decode_s = decode_s
        self._theirs = replica.others.load(replica.name)
        self._queue_s: float | None = None
        self._prefix: Prefix | None = None
        self._load: Load | None = None
        self._share: tuple[float, float] | None = None  # step and chunk, in seconds

    @property
    def name(self) -> str:
        """See `Candidate`."""
        return self.replica.name

    @property
    def role(self) -> str:
        """See `Candidate`."""
        return self.replica.role

    @property
    def known(self) -> Known:
        """See `Candidate`. No session is at home everywhere."""
        return Known(self._stays or not self._ask.session, self.replica.has(self._ask.lora))

    def queue_s(self) -> float:
        """See `Candidate`; drawn once where others' bookings are uncertain."""
        if self._queue_s is None:
            others_s = self.replica.others.queue_s(self.name, self._replicas, self._now_s)
            queue_s = self._beside(self.replica.queue.left_s(self._now_s) + others_s)
            self._queue_s = max(queue_s, self._room_s())
        return self._queue_s

    def step_s(self) -> float:
        """See `Candidate`. Counts those that will decode here, too."""
        contexts = self.replica.contexts
        batch = len(contexts) + self._theirs.contexts
        tokens = contexts.tokens + self._theirs.context_tokens
        return self.replica.speeds.decode.decode_s(batch + 1, tokens + self._ask.prompt_tokens)

    def prefix(self) -> Prefix:
        """See `Candidate`. What a booked prompt holds will have been computed by then."""
        if self._prefix is None:
            found, speeds = self._found, self.replica.speeds
            held = self._held() * speeds.block_tokens
            hbm = max(found.hbm_tokens, held) if speeds.loading is None else found.hbm_tokens
            own = max(found.own_tokens, held)
            self._prefix = Prefix(hbm, own, found.ssd_tokens, max(found.reachable_tokens, own))
        return self._prefix

    def serve_s(self, prefix: Prefix) -> float:
        """See `Candidate`."""
        speeds = self.replica.speeds
        coefficients = speeds.prefill.coefficients
        return self._beside(serve_s(self._ask.prompt_tokens, prefix, coefficients, speeds.loading))

    def stalls_s(self, prefix: Prefix) -> float:
        """See `Candidate`. 0 where the size of a step is not known."""
        speeds, contexts = self.replica.speeds, self.replica.contexts
        if speeds.step_tokens is None or not contexts.live or not math.isfinite(speeds.tbt_s):
            return 0.0
        prefill, decode = speeds.prefill.coefficients, speeds.decode.coefficients
        # The weights are read once for both.
        beside_s = decode.decode_s(contexts.live, contexts.live_tokens)
        beside_s -= min(prefill.a_s, decode.d0_s)
        cached = prefix.hbm_tokens if speeds.loading is None else prefix.reachable_tokens
        step = Step(speeds.step_tokens, beside_s, speeds.tbt_s)
        return stalling_s(self._ask.prompt_tokens, cached, prefill, step)

    def load(self) -> Load:
        """See `Candidate`."""
        if self._load is None:
            mine, theirs = self.replica, self._theirs
            self._load = Load(
                requests=mine.requests + theirs.requests,
                waiting=len(mine.queue) + theirs.waiting,
                prefill_tokens=mine.queue.tokens + theirs.prefill_tokens,
                blocks=len(mine.blocks) + theirs.blocks,
                new_blocks=len(self._keys) - self._held(),
            )
        return self._load

    def _held(self) -> int:
        """Leading blocks that booked prompts hold."""
        return self.replica.blocks.leading(self._keys)

    def _room_s(self) -> float:
        """Seconds until HBM has room: what is booked there goes at the pace of decodes."""
        speeds = self.replica.speeds
        if speeds.kv_tokens is None:
            return 0.0
        load = self.load()
        excess = (load.blocks + load.new_blocks) * speeds.block_tokens - speeds.kv_tokens
        return max(0, excess) / speeds.kv_tokens * self._decode_s

    def _beside(self, prefill_s: float) -> float:
        """Prefill in chunks shares its steps with the decodes that are there."""
        speeds, live = self.replica.speeds, self.replica.contexts.live
        if speeds.step_tokens is None or not live or not prefill_s:
            return prefill_s
        if self._share is None:
            step_s = speeds.decode.decode_s(live, self.replica.contexts.live_tokens)
            self._share = step_s, speeds.prefill.prefill_s(speeds.step_tokens, 0)
        return beside_decodes_s(prefill_s, *self._share)
