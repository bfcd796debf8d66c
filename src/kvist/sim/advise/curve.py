"""Hits by capacity, from replays of the production eviction orders; and the value of a byte more.

`sim.replay` reports hit tokens, and FLOPs of one fixed model. Both sums are of the same hits, so
together they give the sum of the squared prefixes, and with it the time that any model saves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvist.sim.advise.advice import CurvePoint, MarginalPoint, Traffic
from kvist.sim.advise.question import Question
from kvist.sim.advise.sample import Sample
from kvist.sim.advise.traffic import saved_s
from kvist.sim.contenders import contender
from kvist.sim.replay import Result, prefill_flops, replay
from kvist.sim.traces import Trace

ENGINE_POLICY, KVIST_POLICY = "leaf-lru", "value"
POLICIES = (ENGINE_POLICY, KVIST_POLICY)
_SMALLEST_SHARE = 1 / 64  # of all blocks, if the engine's own pool holds more than that
_BETWEEN = 6  # parts of the way between two measured capacities, to place a knee
# FLOPs of p tokens are `_LINEAR p + _SQUARE p²`.
_SQUARE = (prefill_flops(2) - 2 * prefill_flops(1)) / 2
_LINEAR = prefill_flops(1) - _SQUARE

Progress = Callable[[float], None]


def capacities(unique_blocks: int, hbm_blocks: int, count: int) -> list[int]:
    """`count` sizes in blocks, evenly in log, from one engine's own pool to all blocks."""
    first = max(1, min(hbm_blocks, int(unique_blocks * _SMALLEST_SHARE)))
    if first >= unique_blocks:
        return [max(1, unique_blocks)]
    step = math.log(unique_blocks / first) / (count - 1)
    sizes = [round(first * math.exp(step * i)) for i in range(count - 1)] + [unique_blocks]
    return list(dict.fromkeys(sizes))


def measure(
    part: Sample, facts: Traffic, question: Question, progress: Progress
) -> tuple[CurvePoint, ...]:
    """Replays `POLICIES` at `capacities`; ratios and times are of the whole trace."""
    block_bytes = facts.block_tokens * question.model.token_bytes
    hbm_blocks = question.hbm_tokens // facts.block_tokens
    sizes = capacities(facts.unique_blocks, hbm_blocks, question.effort.capacities)
    total = len(POLICIES) * len(sizes) * max(1, len(part.trace.requests))
    done = 0
    found = []
    for policy in POLICIES:
        for size in sizes:
            small = part.capacity_blocks(size)
            start = done
            result = replay(
                part.trace,
                contender(policy, part.trace, small),
                small,
                lambda n, start=start: progress((start + n) / total),  # type: ignore[misc]
            )
            done += len(part.trace.requests)
            found.append(_point(result, size * block_bytes, part, facts, question))
    return tuple(found)


def _point(
    result: Result, capacity_bytes: int, part: Sample, facts: Traffic, question: Question
) -> CurvePoint:
    tokens, squares = _hits(result, part.trace)
    seen_ratio = facts.ideal_hit_ratio + part.ideal_error_ratio  # the sample's own ideal
    mend = facts.ideal_hit_ratio / seen_ratio if seen_ratio > 0 else 1.0
    sampled_tokens = sum(r.input_tokens for r in part.trace.requests)
    scale = mend * facts.input_tokens / max(1, sampled_tokens)
    block_bytes = facts.block_tokens * question.model.token_bytes
    saved = saved_s(question.prefill, tokens, squares) * scale
    return CurvePoint(
        policy=result.policy,
        capacity_bytes=capacity_bytes,
        token_hit_ratio=min(facts.ideal_hit_ratio, result.token_hit_ratio * mend),
        saved_device_s=min(facts.ideal_saved_device_s, saved),
        written_bytes=result.blocks_written * block_bytes / max(1e-9, part.share_ratio),
    )


def _hits(result: Result, trace: Trace) -> tuple[float, float]:
    """Sums over requests of the cached prefix in tokens, and of its square."""
    tokens = result.token_hit_ratio * max(1, sum(r.input_tokens for r in trace.requests))
    all_flops = sum(prefill_flops(r.input_tokens) for r in trace.requests)
    squares = (result.flops_saved_ratio * max(1.0, all_flops) - _LINEAR * tokens) / _SQUARE
    return tokens, max(0.0, squares)


@dataclass(frozen=True, slots=True)
class Reach:
    """A capacity, the *tokens* that it hits, and the node seconds that it saves."""

    size_bytes: int
    hit_ratio: float
    saved_device_s: float


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy's points as functions of capacity, between points straight in log capacity."""

    sizes: tuple[float, ...]
    hit_ratios: tuple[float, ...]
    saved: tuple[float, ...]
    written: tuple[float, ...]

    @staticmethod
    def of(points: Sequence[CurvePoint], policy: str) -> Curve:
        """From measured points; a larger cache never counts as a worse one."""
        own = sorted((p for p in points if p.policy == policy), key=lambda p: p.capacity_bytes)
        hits: list[float] = []
        saved: list[float] = []
        for point in own:
            hits.append(max(point.token_hit_ratio, hits[-1] if hits else 0.0))
            saved.append(max(point.saved_device_s, saved[-1] if saved else 0.0))
        return Curve(
            tuple(float(p.capacity_bytes) for p in own),
            tuple(hits),
            tuple(saved),
            tuple(p.written_bytes for p in own),
        )

    def hit_ratio(self, capacity_bytes: float) -> float:
        return self._at(capacity_bytes, self.hit_ratios)

    def saved_device_s(self, capacity_bytes: float) -> float:
        return self._at(capacity_bytes, self.saved)

    def reach(self, capacity_bytes: int) -> Reach:
        """What a capacity comes to."""
        hit_ratio, saved_s = self.hit_ratio(capacity_bytes), self.saved_device_s(capacity_bytes)
        return Reach(capacity_bytes, hit_ratio, saved_s)

    def written_bytes(self, capacity_bytes: float) -> float:
        return self._at(capacity_bytes, self.written)

    def _at(self, capacity_bytes: float, values: tuple[float, ...]) -> float:
        if capacity_bytes <= self.sizes[0]:  # towards nothing at no capacity
            return values[0] * max(0.0, capacity_bytes) / self.sizes[0]
        for i in range(1, len(self.sizes)):
            low, high = self.sizes[i - 1], self.sizes[i]
            if capacity_bytes <= high:
                part = math.log(capacity_bytes / low) / math.log(high / low)
                return values[i - 1] + part * (values[i] - values[i - 1])
        return values[-1]


def marginal(
    curve: Curve, facts: Traffic, question: Question, above: Reach, paid_from_bytes: float
) -> tuple[MarginalPoint, ...]:
    """What a GB more of a tier earns an hour: slopes of the concave hull.

    A tier holds copies of what is above it, and saves nothing more until it is larger. On the
    hull it has to earn all of it that is paid for.

    Args:
        above: what is above the tier, or free.
        paid_from_bytes: capacity of the tier from which on it has its price.
    """
    per_hour = 3600 / facts.span_s * question.dollars_per_device_s
    measured = [float(above.size_bytes)]
    measured += [size for size in curve.sizes if size > above.size_bytes * 1.001]
    knots = []
    for low, high in itertools.pairwise(measured):
        knots += [low * (high / low) ** (i / _BETWEEN) for i in range(1, _BETWEEN + 1)]
    points = [(paid_from_bytes / 1e9, above.saved_device_s * per_hour)]
    points += [
        (size / 1e9, max(above.saved_device_s, curve.saved_device_s(size)) * per_hour)
        for size in knots
    ]
    hull: list[tuple[float, float]] = []
    for point in points:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    return tuple(
        MarginalPoint(round(end[0] * 1e9), _slope(start, end))
        for start, end in itertools.pairwise(hull)
    )


def _slope(low: tuple[float, float], high: tuple[float, float]) -> float:
    return (high[1] - low[1]) / (high[0] - low[0])


def knee_bytes(slopes: Sequence[MarginalPoint], price_gb_hour: float) -> int:
    """The capacity up to which every GB earns at least its price; 0 if none does."""
    worth = [p.capacity_bytes for p in slopes if p.dollars_per_gb_hour >= price_gb_hour]
    return max(worth, default=0)
