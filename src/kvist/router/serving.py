"""Seconds to serve a prompt on a replica: compute it, load what the node has, or fetch the rest."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.core.outcome import Tier
from kvist.cost.prefill import PrefillCoefficients
from kvist.cost.transfer import TransferTimes
from kvist.router.candidates import Prefix


@dataclass(frozen=True, slots=True)
class Loading:
    """How KV comes to a replica from tiers and peers.

    Attributes:
        times: of a transfer, by tier (`dram`, `ssd`, `remote`).
        token_bytes: KV of a token.
        block_tokens: tokens of a block.
        per_load_s: fixed overhead of a load.
        per_block_s: overhead of each of its blocks.
    """

    times: TransferTimes
    token_bytes: int
    block_tokens: int
    per_load_s: float
    per_block_s: float

    def move_s(self, tokens: int, tier: Tier) -> float:
        """Seconds to bring the KV of `tokens` from `tier`, without the fixed overhead."""
        if not tokens:
            return 0.0
        blocks = tokens // self.block_tokens
        moving_s = self.times.transfer_s(tokens * self.token_bytes, tier.value)
        return moving_s + blocks * self.per_block_s


def serve_s(
    prompt_tokens: int, prefix: Prefix, prefill: PrefillCoefficients, loading: Loading | None
) -> float:
    """The least of computing what HBM lacks, loading from the node's tiers, and also fetching.

    Source: Mooncake (FAST'25), Algorithm 1; it fetches above a threshold of lengths, this where
    fetching is predicted to be faster. `loading` is None where nothing is ever loaded.
    """
    hbm, own = prefix.hbm_tokens, prefix.own_tokens
    best_s = prefill.prefill_s(prompt_tokens - hbm, hbm)
    on_ssd, far = prefix.ssd_tokens, prefix.reachable_tokens
    if loading is None or far <= own <= hbm:
        return best_s
    load_s = loading.per_load_s
    load_s += loading.move_s(own - hbm - on_ssd, Tier.DRAM) + loading.move_s(on_ssd, Tier.SSD)
    if own > hbm:
        best_s = min(best_s, load_s + prefill.prefill_s(prompt_tokens - own, own))
    if far > own:
        load_s += loading.move_s(far - own, Tier.REMOTE)
        best_s = min(best_s, load_s + prefill.prefill_s(prompt_tokens - far, far))
    return best_s


@dataclass(frozen=True, slots=True)
class Step:
    """A step of an engine that computes prompts in chunks beside decodes.

    Attributes:
        tokens: of a chunk.
        beside_s: seconds that decodes add.
        limit_s: that a step may take.
    """

    tokens: int
    beside_s: float
    limit_s: float


def beside_decodes_s(prefill_s: float, step_s: float, chunk_s: float) -> float:
    """Prefill of `prefill_s` where every chunk of `chunk_s` shares its step with decodes."""
    return prefill_s * (1 + step_s / chunk_s)


def stalling_s(
    prompt_tokens: int, cached_tokens: int, prefill: PrefillCoefficients, step: Step
) -> float:
    """Seconds of a prefill whose steps take longer than those that decode beside it are promised.

    The deeper a chunk is in its prompt the longer it takes; what comes before those is left out.
    """
    spare_s = step.limit_s - step.beside_s - prefill.prefill_s(step.tokens, 0)
    deeper_s = 2 * prefill.c_s * step.tokens  # than the chunk before, for each token between
    if not deeper_s and spare_s >= 0:
        return 0.0
    begin = max(cached_tokens, int(spare_s / deeper_s) if deeper_s else 0)
    new = prompt_tokens - begin
    if new <= 0:
        return 0.0
    passes = -(-new // step.tokens)
    return prefill.prefill_s(new, begin) + (passes - 1) * prefill.a_s
