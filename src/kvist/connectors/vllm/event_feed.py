"""KV events in vLLM's own format, for routers and indexes that already read them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvist.core.events import Cleared, KvEvent, Removed, Stored
from kvist.core.outcome import Tier

if TYPE_CHECKING:
    from kvist.connectors.vllm.sequences import Sequence as Request

_BELOW = dict.fromkeys((Tier.SSD, Tier.PEER, Tier.REMOTE), "STORAGE")
_MEDIUM = {Tier.HBM: "GPU", Tier.DRAM: "CPU", **_BELOW}
_LIMIT = 100_000  # events kept between two steps; beyond it the oldest are dropped and counted


class EventFeed:
    """Collects events from the store's threads; the scheduler thread takes them."""

    def __init__(self, block_tokens: int, *, enabled: bool) -> None:
        self._block_tokens = block_tokens
        self._enabled = enabled
        self._lock = threading.Lock()
        self._events: deque[Any] = deque(maxlen=_LIMIT)
        self.dropped = 0

    def store_event(self, event: KvEvent) -> None:
        """From the store, on any of its threads. DRAM arrivals come through `saved`."""
        if not self._enabled:
            return
        if isinstance(event, Stored):
            if event.tier is not Tier.DRAM:
                self._put(self._stored(event.keys, event.parent, (), event.tier, None))
        elif isinstance(event, Removed):
            from vllm.distributed.kv_events import BlockRemoved

            self._put(BlockRemoved(block_hashes=list(event.keys), medium=_MEDIUM[event.tier]))
        elif isinstance(event, Cleared):
            from vllm.distributed.kv_events import AllBlocksCleared

            self._put(AllBlocksCleared())

    def saved(self, seq: Request, blocks: Sequence[int]) -> None:
        """Blocks of a request that became present in DRAM, with their tokens."""
        if not self._enabled or not blocks:
            return
        bt, tokens = self._block_tokens, seq.request.all_token_ids
        for run in _runs(blocks):
            span = tokens[run[0] * bt : (run[-1] + 1) * bt]
            keys = tuple(seq.chain.keys[b] for b in run)
            self._put(self._stored(keys, seq.chain.parent(run[0]), span, Tier.DRAM, seq.request))

    def take(self) -> list[Any]:
        """Everything since the last call."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def _stored(
        self,
        keys: tuple[bytes, ...],
        parent: bytes | None,
        tokens: Iterable[int],
        tier: Tier,
        request: Any,
    ) -> Any:
        from vllm.distributed.kv_events import BlockStored

        lora = request.lora_request if request is not None else None
        return BlockStored(
            block_hashes=list(keys),
            parent_block_hash=parent,
            token_ids=list(tokens),
            block_size=self._block_tokens,
            lora_id=lora.lora_int_id if lora else None,
            medium=_MEDIUM[tier],
            lora_name=lora.lora_name if lora else None,
        )

    def _put(self, event: Any) -> None:
        with self._lock:
            if len(self._events) == _LIMIT:
                self.dropped += 1
            self._events.append(event)


def _runs(blocks: Sequence[int]) -> list[list[int]]:
    """Splits ascending block numbers into runs of neighbours."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and runs[-1][-1] == block - 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs
