"""Hit ratio of one pool by capacity and policy, in the order of the requests (their Fig. 9)."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.sim.contenders import contender
from kvist.sim.replay import replay
from kvist.sim.traces import Trace


@dataclass(frozen=True, slots=True)
class HitRun:
    """One replay; `pool_tokens` is None for a pool that holds everything."""

    trace: str
    policy: str
    pool_tokens: int | None

    @property
    def label(self) -> str:
        """What is being done, for a line of progress."""
        pool = f"{self.pool_tokens / 1e6:g} M tokens" if self.pool_tokens else "endless pool"
        return f"{self.trace}: {self.policy}, {pool}"


def token_hit_ratio(run: HitRun, trace: Trace) -> float:
    """Share of the prompts' tokens that the pool held."""
    blocks = trace.unique_blocks
    if run.pool_tokens is not None:
        blocks = run.pool_tokens // trace.block_tokens
    blocks = max(1, blocks)
    return replay(trace, contender(run.policy, trace, blocks), blocks).token_hit_ratio
