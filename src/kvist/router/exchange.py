"""What gateways tell each other of their bookings, so that several of them do not herd.

Theory of operation. Each gateway publishes a `LoadReport` every fraction of a second: what it has
booked on each replica. A gateway adds the others' work to its own, less the time since: queues are
worked off while nobody tells. What the others have booked since their last report it cannot know;
it expects the rate of before, spread over all replicas, and draws for each replica how much of it
fell there. The older a report, the wider the draws: gateways that see the same shortest queue do
not all take it. Of a silence no more than `DRAWN_S` is drawn for: a gateway that died books
nothing, and a guess that grew would soon make every replica look full.

A report is a whole, not a change: a lost one costs nothing but its age. A gateway that is silent
for `expire_s` is forgotten, with its load.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

EXPIRES_S = 10.0
DRAWN_S = 1.0
MAX_GATEWAYS = 64
MAX_REPLICAS = 4096


class ReplicaLoad(msgspec.Struct, frozen=True):
    """One gateway's bookings on one replica; fields as in `candidates.Load` and `Contexts`."""

    queue_s: float
    requests: int
    waiting: int
    prefill_tokens: int
    contexts: int
    context_tokens: int
    blocks: int


class LoadReport(msgspec.Struct, frozen=True):
    """All of a gateway's bookings now.

    Attributes:
        gateway: its name, which no other gateway and no earlier start of it has.
        number: greater than that of its last report.
        booked_s: seconds of prefill that it ever booked.
        loads: by replica; those without a booking are left out.
    """

    gateway: str
    number: int
    booked_s: float
    loads: dict[str, ReplicaLoad]


_EMPTY = ReplicaLoad(0.0, 0, 0, 0, 0, 0, 0)


@dataclass(slots=True)
class _Heard:
    report: LoadReport
    at_s: float
    rate: float  # seconds of prefill booked a second


class OtherGateways:
    """The last report of every other gateway."""

    __slots__ = ("_expire_s", "_heard", "_stream")

    def __init__(self, stream: random.Random, expire_s: float = EXPIRES_S) -> None:
        """`stream`: for draws; `expire_s`: of silence, after which a gateway is forgotten."""
        self._expire_s = expire_s
        self._heard: dict[str, _Heard] = {}
        self._stream = stream

    def __len__(self) -> int:
        return len(self._heard)

    def hear(self, report: LoadReport, now_s: float) -> bool:
        """Takes a report in; False for an old one, or one beyond a limit."""
        before = self._heard.get(report.gateway)
        if before is not None and report.number <= before.report.number:
            return False
        if (before is None and len(self._heard) >= MAX_GATEWAYS) or len(
            report.loads
        ) > MAX_REPLICAS:
            return False
        rate = 0.0
        if before is not None:
            span_s = max(1e-6, now_s - before.at_s)
            rate = max(0.0, report.booked_s - before.report.booked_s) / span_s
        self._heard[report.gateway] = _Heard(report, now_s, rate)
        return True

    def forget_silent(self, now_s: float) -> None:
        """Drops gateways that have not been heard for `expire_s`."""
        for name in [n for n, h in self._heard.items() if now_s - h.at_s > self._expire_s]:
            del self._heard[name]

    def load(self, replica: str) -> ReplicaLoad:
        """All others' bookings on a replica as they were reported."""
        if not self._heard:
            return _EMPTY
        found = [h.report.loads[replica] for h in self._heard.values() if replica in h.report.loads]
        if not found:
            return _EMPTY
        return ReplicaLoad(
            sum(load.queue_s for load in found),
            sum(load.requests for load in found),
            sum(load.waiting for load in found),
            sum(load.prefill_tokens for load in found),
            sum(load.contexts for load in found),
            sum(load.context_tokens for load in found),
            sum(load.blocks for load in found),
        )

    def queue_s(self, replica: str, replicas: int, now_s: float) -> float:
        """Seconds of others' prefill on a replica: reported, worked off since, and drawn anew.

        Args:
            replicas: over how many what was booked since is spread.
        """
        total_s = 0.0
        for heard in self._heard.values():
            age_s = max(0.0, now_s - heard.at_s)
            load = heard.report.loads.get(replica)
            if load is not None:
                total_s += max(0.0, load.queue_s - age_s)
            unseen_s = heard.rate * min(age_s, DRAWN_S) / max(1, replicas)
            if unseen_s:
                total_s += self._stream.uniform(0.0, 2 * unseen_s)
        return total_s
