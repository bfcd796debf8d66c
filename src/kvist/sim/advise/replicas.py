"""How many replicas the engine alone needs, and how much KV their HBM holds beside what runs.

A node is busy with prefill (what its own cache does not hold) and with decode steps at the largest
batch that fits. HBM that running requests fill holds no cache; by Little's law that is the rate
times the tokens of a request times its time in the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvist.sim.advise.advice import Traffic
from kvist.sim.advise.curve import Curve
from kvist.sim.advise.question import Question

MOST_BUSY_RATIO = 0.9
_MOST_NODES = 4096
_ROUNDS = 5
_MOST_SEQUENCES = 256
_LEAST_CACHE_RATIO = 0.05  # of HBM's pool: blocks that just ended are still there


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas, what their HBM caches over all of them."""

    nodes: int
    cache_bytes: int
    utilisation_ratio: float


def fleet(curve: Curve, facts: Traffic, question: Question) -> Fleet:
    """The nodes asked for, or the fewest that keep the engine alone below `MOST_BUSY_RATIO`.

    Args:
        curve: of the engine's own eviction order.
    """
    if question.nodes is not None:
        return _loaded(question.nodes, curve, facts, question)
    low, high = 0, 1
    while (
        high < _MOST_NODES
        and _loaded(high, curve, facts, question).utilisation_ratio >= MOST_BUSY_RATIO
    ):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if _loaded(middle, curve, facts, question).utilisation_ratio < MOST_BUSY_RATIO:
            high = middle
        else:
            low = middle
    return _loaded(high, curve, facts, question)


def _loaded(nodes: int, curve: Curve, facts: Traffic, question: Question) -> Fleet:
    context = facts.input_tokens / facts.requests
    outputs_per_s = facts.output_tokens / facts.span_s / nodes
    decode = question.decode
    most = max(1.0, min(_MOST_SEQUENCES, question.hbm_tokens / max(1.0, context)))
    step_s = decode.decode_s(max(1, int(most)), int(most * context))
    decoding = outputs_per_s * step_s / max(1, int(most))
    cache_bytes, prefilling = nodes * question.hbm_tokens * question.model.token_bytes, 0.0
    for _ in range(_ROUNDS):  # a smaller cache makes more prefill, and that more running requests
        computed_s = facts.prefill_device_s - curve.saved_device_s(cache_bytes)
        prefilling = computed_s / facts.span_s / nodes
        # A batch B makes B tokens a step of `d0 + d1 B + d2 B context`, beside the prefills.
        slack = 1 - prefilling - outputs_per_s * (decode.d1_s + decode.d2_s * context)
        batch = outputs_per_s * decode.d0_s / slack if slack > 0 else math.inf
        running_tokens = min(most, batch + prefilling) * context
        free = max(question.hbm_tokens - running_tokens, _LEAST_CACHE_RATIO * question.hbm_tokens)
        cache_bytes = int(nodes * free * question.model.token_bytes)
    return Fleet(nodes, cache_bytes, prefilling + decoding)
