"""What goes wrong and when: faults that were named, and those drawn by seed."""

from __future__ import annotations

import random

from kvist.sim.des.spec import ClusterSpec, Fault, FaultKind


def planned_faults(
    spec: ClusterSpec, duration_s: float, stream: random.Random
) -> tuple[Fault, ...]:
    """The faults of a run, in order of start.

    Args:
        duration_s: from the first arrival to the last; random faults begin within it.
        stream: where random faults are drawn from.
    """
    found = list(spec.faults)
    drawn = spec.random_faults
    for kind, count in (
        (FaultKind.LOST_NODE, drawn.lost_nodes),
        (FaultKind.SLOW_DISK, drawn.slow_disks),
        (FaultKind.DEGRADED_LINK, drawn.degraded_links),
    ):
        for _ in range(count):
            start_s = stream.uniform(0.0, max(0.0, duration_s))
            node = stream.randrange(len(spec.roles))
            found.append(Fault(kind, node, start_s, start_s + drawn.lasting_s))
    return tuple(sorted(found, key=lambda f: (f.start_s, f.node, f.kind.value)))
