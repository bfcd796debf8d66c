"""What each replica already has of a request's prefix, and in which tier.

A replica is an engine; beside it may stand its host's Kvist node. Both publish KV events, which
the index follows as a `Directory` does (order, gaps, replays, dumps, restarts): it is one, and can
be the directory of a `ClusterView`. It also understands stock engines (`feed.py`), knows which
publishers a replica sees, and believes for a while what was predicted.

**Predictions.** A request that was sent to a replica will be in its HBM soon; before the first
event says so, requests that share its prefix would scatter. `predict` closes that gap, and serves
engines that send no events at all, for longer. A prediction is believed for its life and at most
twice that: predictions of one life alternate between two tiers of their own, of which the older one
is emptied as a whole.

**Bounds.** The table has `Limits.most_keys` keys at most, and forgets those not looked up lately;
`kvist_router_index_evicted_total` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvist.cluster.directory import BIT_OF, Directory, Limits, no_pause
from kvist.cluster.follower import Ask
from kvist.core.events import Cleared, KvEvent
from kvist.core.keys import Key
from kvist.core.outcome import Tier
from kvist.native import OwnerTable, chain_keys
from kvist.router.feed import HEARD, IN_HBM, SILENT, EngineFeed, Seeds

_NOBODY = 0xFFFF  # in place of a publisher's number
_DRAM = IN_HBM | BIT_OF[Tier.DRAM]
_SSD = _DRAM | BIT_OF[Tier.SSD]
_LENT = BIT_OF[Tier.DRAM] | BIT_OF[Tier.SSD]
_LEVELS = (IN_HBM, _DRAM, _SSD, _SSD | BIT_OF[Tier.PEER] | BIT_OF[Tier.REMOTE])


class Prefix(msgspec.Struct, frozen=True, gc=False):
    """How many blocks a replica has from a request's first one on, without a gap.

    Each counts blocks of all tiers up to its own, so they ascend: with HBM, DRAM, DRAM, SSD, HBM it
    is 1, 3, 5, 5. What is in HBM costs nothing; what is beyond has to be loaded or computed.

    Attributes:
        hbm_blocks: in the engine's KV cache, or predicted to be there soon.
        dram_blocks: there, or in the node's DRAM.
        ssd_blocks: there, or on the node's SSD.
        reachable_blocks: there, or in what peers and remotes lend the node.
    """

    hbm_blocks: int
    dram_blocks: int
    ssd_blocks: int
    reachable_blocks: int


@dataclass(frozen=True, slots=True)
class Lives:
    """How long predictions are believed at least: of engines that publish, and of others."""

    heard_s: float = 5.0
    silent_s: float = 120.0


@dataclass(slots=True)
class _Predictions:
    """Predictions of one life: two tiers that take turns."""

    life_s: float
    tiers: tuple[int, int]
    turn: int = 0
    until_s: float = float("-inf")

    def expire(self, table: OwnerTable, now_s: float) -> None:
        if now_s < self.until_s:
            return
        if now_s >= self.until_s + self.life_s:
            table.fade(sum(self.tiers))
        else:
            self.turn = 1 - self.turn
            table.fade(self.tiers[self.turn])
        self.until_s = now_s + self.life_s


@dataclass(frozen=True, slots=True)
class _Publishers:
    engine: str
    node: str | None


class PrefixIndex(Directory):
    """Which replica has how much of a prefix; for one model. Not thread-safe: the caller's lock."""

    def __init__(
        self,
        *,
        block_tokens: int,
        fingerprint: bytes,
        adapters: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        lives: Lives | None = None,
        by_name: bool = False,
        pause: Callable[[], None] = no_pause,
    ) -> None:
        """An index without replicas.

        Args:
            block_tokens: tokens of a block, in keys and in the engines' events.
            fingerprint: of the keyspace, 32 bytes.
            adapters: the digest of each LoRA adapter, by its name.
            by_name: as in `Seeds`.
            pause: as in `Directory`.
        """
        super().__init__(limits, pause=pause)
        lives = lives or Lives()
        self.block_tokens = block_tokens
        self._adapters, self._by_name = adapters, by_name
        self.feed = EngineFeed(block_tokens, Seeds(fingerprint, adapters, by_name=by_name))
        self._heard = _Predictions(lives.heard_s, HEARD)
        self._silent = _Predictions(lives.silent_s, SILENT)
        self._replicas: dict[str, _Publishers] = {}
        self._rows: tuple[str, ...] = ()  # replicas, as rows of `_readers`
        self._readers: npt.NDArray[np.uint16] = np.empty((0, 2), np.uint16)
        self._read_at = -1  # the numbering that `_readers` was made for
        self.predicted_blocks = 0

    def rename(self, fingerprint: bytes) -> None:
        """Names blocks in another keyspace from now on; whatever was heard is to be heard again."""
        self.feed.seeds = Seeds(fingerprint, self._adapters, by_name=self._by_name)
        for publisher in self.nodes():
            self.drop(publisher)

    def attach(self, replica: str, *, engine: str | None = None, node: str | None = None) -> None:
        """A replica is there, and sees what these publishers have.

        Args:
            engine: the name that its engine's events come under; the replica's own by default.
            node: the Kvist node that it reads from.
        """
        self._replicas[replica] = _Publishers(engine or replica, node)
        self._read_at = -1

    def detach(self, replica: str) -> None:
        """A replica is gone, and its engine's blocks; its node may serve others."""
        publishers = self._replicas.pop(replica, None)
        if publishers is not None:
            self.drop(publishers.engine)
            self._read_at = -1

    def keys(
        self, tokens: Sequence[int] | npt.NDArray[np.uint32], *, lora: str = "", salt: str = ""
    ) -> list[Key]:
        """The keys of a prompt's full blocks; none for an adapter that is not known."""
        seed = self.feed.seeds.seed(lora, salt)
        return [] if seed is None else chain_keys(seed, tokens, self.block_tokens)

    def match(self, keys: Sequence[Key]) -> dict[str, Prefix]:
        """What each replica has of a prefix; those that have nothing are not in it."""
        self._refresh()
        rows = self._rows
        found = self._table.reach(keys, self._readers, _LEVELS)
        return {rows[row]: Prefix(*runs) for row, *runs in found}

    def farthest(self, keys: Sequence[Key], nodes: Sequence[str]) -> int:
        """The most blocks, from the first on, that one of these nodes has where it lends them."""
        numbers = [self._number(node) for node in nodes]
        rows = np.array([(number, _NOBODY) for number in numbers], np.uint16).reshape(-1, 2)
        return max((run for _, run in self._table.reach(keys, rows, (_LENT,))), default=0)

    def match_many(self, requests: Sequence[Sequence[Key]]) -> list[dict[str, Prefix]]:
        """`match` for each request; other threads run meanwhile."""
        self._refresh()
        rows = self._rows
        return [
            {rows[row]: Prefix(*runs) for row, *runs in found}
            for found in self._table.reach_many(requests, self._readers, _LEVELS)
        ]

    def predict(self, replica: str, keys: Sequence[Key], now_s: float) -> None:
        """A replica was chosen for a request, and will have these blocks in HBM soon."""
        self.expire(now_s)
        publishers = self._replicas.get(replica)
        source = self._source(publishers.engine) if publishers is not None else None
        if source is None or not keys:
            return
        is_heard = source.follower.last >= 0 and self.feed.understands(source.number)
        predictions = self._heard if is_heard else self._silent
        self._table.add(source.number, predictions.tiers[predictions.turn], keys)
        self.predicted_blocks += len(keys)

    def understands(self, publisher: str) -> bool:
        """Whether what an engine says of its own cache can be used, as far as it has said any."""
        source = self._sources.get(publisher)
        return source is None or self.feed.understands(source.number)

    def asks(self, now_s: float) -> list[Ask]:
        """As `Directory.asks`, to be called each tick; predictions end here, too."""
        self.expire(now_s)
        return super().asks(now_s)

    def expire(self, now_s: float) -> None:
        """Ends predictions that are too old."""
        self._heard.expire(self._table, now_s)
        self._silent.expire(self._table, now_s)

    def measures(self) -> dict[str, float]:
        """What the index counts, under the names of `kvist.metrics`."""
        left_out = self.feed.counts
        return {
            "kvist_router_index_blocks": len(self),
            "kvist_router_index_bytes": self.memory_bytes,
            "kvist_router_index_evicted_total": self.evicted,
            "kvist_router_index_predicted_total": self.predicted_blocks,
            "kvist_router_index_left_out_total.orphan": left_out.orphans,
            "kvist_router_index_left_out_total.unnamed": left_out.unnamed,
            "kvist_router_index_left_out_total.block_size": left_out.mismatched,
            "kvist_router_index_left_out_total.partial": left_out.partial,
            "kvist_router_index_left_out_total.group": left_out.other_groups,
            "kvist_event_batches_total": self.counts.batches,
            "kvist_event_gaps_total": self.gaps,
            "kvist_event_asks_total": self.counts.asks,
            "kvist_event_restarts_total": self.counts.restarts,
        }

    def _apply(self, number: int, event: KvEvent) -> None:
        if isinstance(event, Cleared):
            self._void(number)
        else:
            self.feed.apply(self._table, number, self._names[number] or "", event)

    def _void(self, number: int) -> None:
        super()._void(number)
        self.feed.forget(number)

    def _refresh(self) -> None:
        """Brings the numbers of the replicas' publishers up to date."""
        if self._read_at == self._numbering:
            return
        self._rows = tuple(self._replicas)
        readers = [(self._number(p.engine), self._number(p.node)) for p in self._replicas.values()]
        self._readers = np.array(readers, np.uint16).reshape(-1, 2)
        self._read_at = self._numbering

    def _number(self, publisher: str | None) -> int:
        source = self._sources.get(publisher) if publisher is not None else None
        return _NOBODY if source is None else source.number
