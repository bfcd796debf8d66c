"""Time to the first token of prompts of cached passages: blended against full prefill.

An earlier request began with each passage, so its KV is in the store. Prompts take the passages in
ever new order, so nothing but their introduction can match as a prefix. Both ways are measured in
one run, turn by turn; the result is the ratio of their medians. A blended time has everything in
it: finding, reading, moving, repairing, and the pass that gives the first token.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from kvist.bench.blend.prompts import PassagePrompt
from kvist.core.keyspace import Keyspace
from kvist.policy.leaf_lru import LeafLru
from kvist.store import TieredStore
from kvist.tiers.dram import Arena

_BLOCK_TOKENS = 32
_DEADLINE_S = 5.0
_SEED = 11
_WARM_UPS = 1


class SpeedResult(msgspec.Struct, frozen=True):
    """Medians in seconds, of one run; `faster` is full prefill ÷ blended."""

    prompts: int
    tokens: int
    passages: int
    blended_tokens: int
    repaired_tokens: int
    floor_ratio: float
    outcomes: dict[str, int]
    full_s: float
    blended_s: float
    faster: float
    faster_low: float
    faster_high: float
    stages_s: dict[str, float]


def measure_ttft(
    model: Any,
    folder: Path,
    prompt: PassagePrompt,
    *,
    rounds: int,
    floor_ratio: float,
    said: Callable[[int, int], None] = lambda _done, _all: None,
) -> SpeedResult:
    """Measures `rounds` prompts of `prompt`'s passages.

    Args:
        model: a Transformers model.
        folder: where it is.
        prompt: introduction, passages and question.
        rounds: prompts, each measured both ways.
        floor_ratio: what is computed again at least.
        said: told of each round.
    """
    from kvist.connectors.transformers import BlendSettings, TransformersKvist, model_keyspace

    keyspace = model_keyspace(model, model_path=folder, block_tokens=_BLOCK_TOKENS)
    blocks = 2 + sum(len(p) + len(prompt.question) for p in prompt.passages) // _BLOCK_TOKENS
    settings = BlendSettings(floor_ratio=floor_ratio)
    with _store(keyspace, 2 * blocks) as store:
        kv = TransformersKvist(model, store, keyspace, read_deadline_s=_DEADLINE_S, blend=settings)
        for passage in prompt.passages:
            _first_token(kv.generate, [*passage, *prompt.question])
        rng = random.Random(_SEED)
        pairs, reports = [], []
        for number in range(rounds + _WARM_UPS):
            order = rng.sample(prompt.passages, len(prompt.passages))
            tokens = [*prompt.intro, *(t for p in order for t in p), *prompt.question]
            if number % 2:
                full_s, blended_s = _plain(model, tokens), _first_token(kv.generate, tokens)
            else:
                blended_s, full_s = _first_token(kv.generate, tokens), _plain(model, tokens)
            if number >= _WARM_UPS:
                pairs.append((full_s, blended_s))
                reports.append(kv.last.blend)
            said(number + 1, rounds + _WARM_UPS)
    outcomes: dict[str, int] = {}
    for report in reports:
        outcomes[report.outcome.value] = outcomes.get(report.outcome.value, 0) + 1
    full_s, blended_s = (median(pair[i] for pair in pairs) for i in (0, 1))
    each = sorted(full / blended for full, blended in pairs)
    return SpeedResult(
        prompts=rounds,
        tokens=len(prompt.tokens),
        passages=len(prompt.passages),
        blended_tokens=round(median(r.blended_tokens for r in reports)),
        repaired_tokens=round(median(r.repaired_tokens for r in reports)),
        floor_ratio=floor_ratio,
        outcomes=outcomes,
        full_s=full_s,
        blended_s=blended_s,
        faster=full_s / blended_s,
        faster_low=each[0],
        faster_high=each[-1],
        stages_s={
            "find": median(r.find_s for r in reports),
            "load": median(r.load_s for r in reports),
            "move and repair": median(r.repair_s for r in reports),
        },
    )


def ttft_text(found: SpeedResult) -> str:
    """The result in a few lines."""
    stages = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in found.stages_s.items())
    what = ", ".join(f"{n} {name}" for name, n in found.outcomes.items())
    return (
        f"TTFT of {found.tokens} tokens, {found.passages} passages cached: full prefill "
        f"{found.full_s:.2f} s, blended {found.blended_s:.2f} s at {found.floor_ratio:.0%}: "
        f"{found.faster:.2f} × faster ({found.faster_low:.2f} to {found.faster_high:.2f} over "
        f"{found.prompts} prompts: {what}); {found.blended_tokens} tokens from spans, "
        f"{found.repaired_tokens} of them computed again. Of it: {stages}."
    )


def _store(keyspace: Keyspace, blocks: int) -> TieredStore:
    size = keyspace.layout.block_bytes
    arena = Arena(blocks * (size + 4096), slot_bytes=size)
    return TieredStore(arena, LeafLru(), None, raw_bytes=size)


def _plain(model: Any, tokens: Sequence[int]) -> float:
    import torch

    mask = torch.ones(1, len(tokens), dtype=torch.long)
    return _first_token(
        lambda row, **more: model.generate(row, attention_mask=mask, **more), tokens
    )


def _first_token(generate: Callable[..., Any], tokens: Sequence[int]) -> float:
    """Seconds until the first token was there."""
    import torch

    row = torch.tensor([tokens])
    began_s = time.perf_counter()
    with torch.no_grad():
        generate(row, do_sample=False, max_new_tokens=1, min_new_tokens=1)
    return time.perf_counter() - began_s
