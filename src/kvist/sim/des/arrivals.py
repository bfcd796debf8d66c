"""When a trace's requests arrive: binned timestamps are spread, and the rate is scaled."""

from __future__ import annotations

import itertools
import random
import statistics

from kvist.sim.des.spec import ArrivalSpec
from kvist.sim.traces import Request, Trace


def arrivals(trace: Trace, spec: ArrivalSpec, stream: random.Random) -> list[tuple[float, Request]]:
    """Requests with their times in seconds from the first one, in order.

    Requests of one timestamp share the time to the next timestamp, or the usual bin where that is
    shorter, in equal parts with a random place in each: arrivals of a steady rate, not of a clock.
    Each then comes up to `jitter_s` of the trace's time later, by chance.
    """
    requests = trace.requests[: spec.limit]
    groups = [
        (time_s, list(group)) for time_s, group in itertools.groupby(requests, lambda r: r.time_s)
    ]
    times = [time_s for time_s, _ in groups]
    bins = [after - before for before, after in itertools.pairwise(times)]
    usual_s = statistics.median_low(bins) if bins else 0.0
    found: list[tuple[float, Request]] = []
    for number, (time_s, group) in enumerate(groups):
        width_s = min(bins[number], usual_s) if number < len(bins) else usual_s
        for place, request in enumerate(group):
            offset = (place + stream.random()) / len(group) if spec.spread and group[1:] else 0.0
            found.append((time_s + width_s * offset, request))
    if spec.jitter_s:
        found = [(time_s + spec.jitter_s * stream.random(), request) for time_s, request in found]
        found.sort(key=lambda pair: pair[0])
    start_s = found[0][0] if found else 0.0
    return [((time_s - start_s) / spec.rate_scale, request) for time_s, request in found]
