"""What another engine has computed of a prompt and is still saving: its request waits for it.

A prefill engine answers when the prompt is computed; its last blocks are copied to the store just
then. Whoever sends the request on says how much was computed (`kvist.computed`), so that it is not
computed again for the sake of some milliseconds: the engine is told to ask again until the blocks
are there. It waits no longer than computing them would take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvist.connectors.appraiser import Appraiser
from kvist.connectors.plan import BlockGeometry
from kvist.connectors.vllm.sequences import Sequence
from kvist.connectors.vllm.stats import Tally
from kvist.core.lease import BlockStore

_LOOK_S = 2e-3


@dataclass(slots=True)
class Handovers:
    """Requests of one engine whose prompts were computed by another; `most_s`: the longest wait."""

    store: BlockStore
    geometry: BlockGeometry
    appraiser: Appraiser
    most_s: float
    tally: Tally
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _until: dict[str, float] = field(default_factory=dict)  # request → when its wait is over

    def waits(self, seq: Sequence, computed_tokens: int) -> bool:
        """Whether blocks are still to come; once it says no of a request it does not change."""
        if not seq.handed_tokens:
            return False
        req_id, size = seq.request.request_id, self.geometry.block_tokens
        keys = seq.chain.extend(seq.request.all_token_ids)
        first = computed_tokens // size
        wanted = keys[first : seq.handed_tokens // size]
        there = len(self.store.match(wanted)) if wanted else 0
        missing = len(wanted) - there
        now_s = self.clock()
        if missing and req_id not in self._until:
            cached = (first + there) * size
            self._until[req_id] = now_s + self._patience_s(missing * size, cached)
        if missing and now_s < self._until[req_id]:
            return True
        self.tally.add("kvist_misses_total.unsaved", missing)
        seq.handed_tokens = 0
        self.forget(req_id)
        return False

    def nap(self) -> None:
        """In a step in which nothing is computed: sleeps a moment, if any request waits.

        The scheduler's thread would spin, and take the time of those who copy.
        """
        if self._until:
            self.sleep(_LOOK_S)

    def forget(self, req_id: str) -> None:
        """A request is over, or waits no more."""
        self._until.pop(req_id, None)

    def _patience_s(self, missing_tokens: int, cached_tokens: int) -> float:
        if not self.appraiser.settled:
            return self.most_s
        return min(self.most_s, self.appraiser.predicted_s([(missing_tokens, cached_tokens)]))
