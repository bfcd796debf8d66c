"""How prefill and decode swing: series of their loads, and the size of the swing.

A series counts requests at each second: in prefill from arrival to first token, in decode from
there to the end. What is slower than `TREND_S` is the traffic's own and taken off. Two series are
in opposite phase where their correlation is negative; the amplitude of that swing is the square
root of minus their covariance, in requests: of two square waves that is half their height.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvist.sim.des.report import Served

TREND_S = 300
_EDGE_RATIO = 0.1  # of the run at either end that is left out: it fills and empties

Series = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Swing:
    """Loads by second, and what they say.

    Attributes:
        prefill: requests in prefill.
        decode: requests in decode.
        amplitude: of the swing in opposite phase, in requests; 0 where there is none.
        correlation: of the two.
    """

    prefill: Series
    decode: Series
    amplitude: float
    correlation: float


def swing(served: Sequence[Served]) -> Swing:
    """The swing of a run's requests, from the first arrival to the last."""
    seconds = max(1, math.ceil(max((s.arrival_s for s in served), default=0.0)))
    prefill = _count(served, seconds, decode=False)
    decode = _count(served, seconds, decode=True)
    edge = int(seconds * _EDGE_RATIO)
    inner = slice(edge, seconds - edge)
    fast_prefill, fast_decode = (_without_trend(s)[inner] for s in (prefill, decode))
    if not fast_decode.size:
        return Swing(prefill, decode, 0.0, 0.0)
    covariance = float((fast_prefill * fast_decode).mean())
    spread = float(fast_prefill.std() * fast_decode.std())
    amplitude = math.sqrt(max(0.0, -covariance))
    return Swing(prefill, decode, amplitude, covariance / spread if spread else 0.0)


def _count(served: Sequence[Served], seconds: int, *, decode: bool) -> Series:
    """Requests in a phase at the end of each second."""
    change = np.zeros(seconds + 2)
    for one in served:
        first_s = one.arrival_s + one.ttft_s
        start_s, end_s = one.arrival_s, min(first_s, one.end_s)
        if decode:
            start_s, end_s = first_s, one.end_s
        if start_s < end_s:
            change[min(seconds, math.ceil(start_s))] += 1
            change[min(seconds, math.ceil(end_s))] -= 1
    return np.cumsum(change)[:seconds]


def _without_trend(series: Series) -> Series:
    """Less its mean over `TREND_S` around each second."""
    width = min(TREND_S, series.size)
    sums = np.convolve(series, np.ones(width), mode="same")
    counts = np.convolve(np.ones(series.size), np.ones(width), mode="same")
    return np.asarray(series - sums / counts, dtype=np.float64)
