"""Kvist's own: the least time, of the request and of those that come behind it.

A request's TTFT on a replica is `queue_s + serve_s`. It also holds up whoever comes to that replica
before its queue is empty, and how many come there is seen by how many wait there. So a second of
work is charged once for the request itself and once for each request that waits at that replica:
nothing where nobody waits, and the more the busier the replica, where work that a cache could have
spared is what others wait for. Long prompts thereby keep away from where many short ones come.

What is fetched from peers is kept, in the place of other blocks, some of which will be computed
again. So a share of the seconds that a fetch spares is charged: a request waits a while for a
replica that has its prefix, `_COPY_MOST_S` at most, rather than to make one more copy of it.

Prefill in chunks also slows whoever decodes there. Little by most chunks; those deep in a long
prompt take longer than a token may. A second of those is charged `_STALL_RATIO` times for each that
decodes, so very long prompts come together where few decode, and the others keep their pace.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvist.router.candidates import Candidate, Prefix
from kvist.router.protocol import Ask


@dataclass(frozen=True, slots=True)
class Settings:
    """What of the policy can be set.

    Attributes:
        temperature: 0 takes the least cost; above, replicas are drawn with `exp(-cost)`, costs
            being stretched over 0 to 1 and divided by it, so that it means the same at any load.
        tie_s: costs that differ by no more are equal; of these the one with the shortest decode
            step, and of those within a hundredth of it any.
        session_s: what it may cost to stay with the replica of a session's last request.
        lora_s: seconds to load an adapter that was not used on a replica lately.
    """

    temperature: float = 0.0
    tie_s: float = 1e-3
    session_s: float = 0.02
    lora_s: float = 1.0


DEFAULTS = Settings()
_COPY_RATIO = 0.2  # of what a fetch spares, what is computed again of the blocks that it evicts
_COPY_MOST_S = 3.0
_STALL_RATIO = 0.3  # what a second of late tokens weighs beside one before a first token
_STEP_TIE_RATIO = 1.01


class Kvist:
    """The least cost in seconds; ties are drawn."""

    def __init__(self, stream: random.Random, settings: Settings = DEFAULTS) -> None:
        self._stream = stream
        self._settings = settings

    def pick(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        """See `Policy`."""
        if len(candidates) == 1:
            return candidates[0]
        costs = [self._cost_s(candidate) for candidate in candidates]
        if self._settings.temperature > 0:
            return self._draw(candidates, costs)
        limit = min(costs) + self._settings.tie_s
        equal = [c for c, cost in zip(candidates, costs, strict=True) if cost <= limit]
        return equal[0] if len(equal) == 1 else self._stream.choice(_fewest(_least_step(equal)))

    def pick_decode(self, ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
        """The shortest decode step; of equal ones any."""
        if len(candidates) == 1:
            return candidates[0]
        return self._stream.choice(_least_step(candidates))

    def reuse(self, candidate: Candidate) -> Prefix:
        """All that there is, peers' blocks too: what is fetched is kept, so hot blocks spread."""
        return candidate.prefix()

    def _cost_s(self, candidate: Candidate) -> float:
        load, prefix = candidate.load(), candidate.prefix()
        charge = 1 + load.waiting
        serve_s = candidate.serve_s(prefix)
        if prefix.reachable_tokens > prefix.own_tokens:
            spared_s = candidate.serve_s(prefix.alone()) - serve_s
            serve_s += min(_COPY_MOST_S, _COPY_RATIO * spared_s)
        cost_s = candidate.queue_s() + charge * serve_s
        if decoding := load.requests - load.waiting:
            cost_s += _STALL_RATIO * decoding * candidate.stalls_s(prefix)
        known, settings = candidate.known, self._settings
        if not known.session:
            cost_s += settings.session_s
        return cost_s if known.lora else cost_s + charge * settings.lora_s

    def _draw(self, candidates: Sequence[Candidate], costs: Sequence[float]) -> Candidate:
        least, most = min(costs), max(costs)
        scale = (most - least) * self._settings.temperature
        if scale <= 0:
            return self._stream.choice(candidates)
        weights = [math.exp((least - cost) / scale) for cost in costs]
        return self._stream.choices(candidates, weights)[0]


def _least_step(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those with the shortest decode steps."""
    steps = [candidate.step_s() for candidate in candidates]
    limit = min(steps) * _STEP_TIE_RATIO
    return [c for c, step_s in zip(candidates, steps, strict=True) if step_s <= limit]


def _fewest(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those with the fewest requests.

    Other gateways' count as long as they run, though their work is believed done earlier.
    """
    counts = [candidate.load().requests for candidate in candidates]
    return [c for c, count in zip(candidates, counts, strict=True) if count == min(counts)]
