"""A node as routers see it: what it would take to serve a request there."""

from __future__ import annotations

from kvist.router.candidates import Load, Prefix
from kvist.router.protocol import Ask
from kvist.router.serving import Loading, Step, beside_decodes_s, serve_s, stalling_s
from kvist.sim.des.engine import Engine
from kvist.sim.des.spec import ClusterSpec, LoadPolicy, Role
from kvist.sim.des.store import NodeStore


class Node:
    """An engine and its part of the store. All predictions are the cost model's."""

    __slots__ = ("_loading", "_tbt_s", "engine")

    def __init__(self, engine: Engine, store: NodeStore, spec: ClusterSpec) -> None:
        self.engine = engine
        self._tbt_s = spec.slo.tbt_s
        self._loading: Loading | None = None
        if spec.store.load is not LoadPolicy.NEVER:
            self._loading = Loading(
                store.times,
                max(1, spec.model.token_bytes),
                engine.pool.block_tokens,
                spec.store.per_load_s,
                spec.store.per_block_s,
            )

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
            chunk_s = engine.prefill.prefill_s(engine.step_tokens, 0)
            left_s = beside_decodes_s(left_s, engine.batch.step_s(), chunk_s)
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
        return serve_s(prompt_tokens, prefix, self.engine.prefill, self._loading)

    def stalls_s(self, prompt_tokens: int, prefix: Prefix) -> float:
        """See `NodeView`."""
        engine = self.engine
        if not engine.chunked or not engine.batch.members:
            return 0.0
        beside_s = engine.batch.step_s() - min(engine.prefill.a_s, engine.decode.d0_s)
        step = Step(engine.step_tokens, beside_s, self._tbt_s)
        cached = prefix.hbm_tokens if self._loading is None else prefix.reachable_tokens
        return stalling_s(prompt_tokens, cached, engine.prefill, step)

    def load(self, ask: Ask) -> Load:
        """See `NodeView`. Blocks are those that HBM holds for requests."""
        engine = self.engine
        waiting = [*engine.waiting, *engine.prefilling]
        pool = engine.pool
        held = (pool.capacity_tokens - pool.spare_tokens) // pool.block_tokens
        matched = engine.memory.matched(ask.keys)
        running = len(engine.joining) + len(engine.batch) + len(engine.bound)
        return Load(
            requests=len(waiting) + running,
            waiting=len(waiting),
            prefill_tokens=sum(s.prompt_tokens - s.computed_tokens for s in waiting),
            blocks=held,
            new_blocks=len(ask.keys) - matched,
        )
