"""A node as routers see it: what it would take to serve a request there."""

from __future__ import annotations

from kvist.core.outcome import Tier
from kvist.sim.des.engine import Engine
from kvist.sim.des.routing import Prefix
from kvist.sim.des.spec import ClusterSpec, LoadPolicy, Role
from kvist.sim.des.store import NodeStore


class Node:
    """An engine and its part of the store. All predictions are the cost model's."""

    __slots__ = ("_loads", "_spec", "_token_bytes", "engine", "store")

    def __init__(self, engine: Engine, store: NodeStore, spec: ClusterSpec) -> None:
        self.engine = engine
        self.store = store
        self._spec = spec.store
        self._loads = spec.store.load is not LoadPolicy.NEVER
        self._token_bytes = max(1, spec.model.token_bytes)

    @property
    def index(self) -> int:
        return self.engine.index

    @property
    def role(self) -> Role:
        return self.engine.role

    def queue_s(self) -> float:
        """See `NodeView`. Beside chunked prefill the decodes take their share of each step."""
        engine = self.engine
        left_s = sum(
            engine.prefill.prefill_s(s.prompt_tokens - s.computed_tokens, s.computed_tokens)
            for s in engine.prefilling
        )
        left_s = max(0.0, left_s - engine.step_elapsed_s) + engine.queued_s
        if engine.chunked and engine.batch.members and left_s:
            left_s *= 1 + engine.batch.step_s() / engine.prefill.prefill_s(engine.step_tokens, 0)
        return left_s

    def step_s(self, more_tokens: int) -> float:
        """See `NodeView`. Counts those that will decode here, too."""
        engine = self.engine
        others = len(engine.batch) + len(engine.joining) + len(engine.bound)
        tokens = engine.batch.context_tokens + engine.bound_tokens
        tokens += sum(sequence.context_tokens for sequence in engine.joining)
        return engine.decode.decode_s(others + 1, tokens + more_tokens)

    def serve_s(self, prompt_tokens: int, prefix: Prefix) -> float:
        """See `NodeView`."""
        prefill_s, hbm, own = self.engine.prefill.prefill_s, prefix.hbm_tokens, prefix.own_tokens
        best_s = prefill_s(prompt_tokens - hbm, hbm)
        if not self._loads:
            return best_s
        on_ssd, far = prefix.ssd_tokens, prefix.reachable_tokens
        load_s = self._spec.per_load_s
        load_s += self._move_s(own - hbm - on_ssd, Tier.DRAM) + self._move_s(on_ssd, Tier.SSD)
        if own > hbm:
            best_s = min(best_s, load_s + prefill_s(prompt_tokens - own, own))
        if far > own:
            load_s += self._move_s(far - own, Tier.REMOTE)
            best_s = min(best_s, load_s + prefill_s(prompt_tokens - far, far))
        return best_s

    def _move_s(self, tokens: int, tier: Tier) -> float:
        blocks = tokens // self.engine.pool.block_tokens
        moving_s = self.store.times.transfer_s(tokens * self._token_bytes, tier.value)
        return moving_s + blocks * self._spec.per_block_s
