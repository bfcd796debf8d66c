"""Requests that wait for a replica: bounded, fair between tenants, in order of urgency within one.

Theory of operation. Deficit round robin (Shreedhar and Varghese, 1995): tenants with requests stand
in a ring. The one at the cursor may send what its deficit pays for; a request costs its tokens that
are to be computed, as of when it came. Where it cannot pay it is given a quantum times its weight
and the cursor moves on. Where a whole round would send nothing, the rounds that are missing are
given at once, so the work does not depend on the size of a request. A tenant whose queue is empty
leaves the ring and its deficit lapses: nobody saves up.

Priorities order the requests of one tenant only; between tenants they would be a way round
fairness. Of equal priority the earliest deadline goes first; of those without one the shortest, as
far as age allows: a request ranks by when it came plus `STRETCH` times the seconds that it takes,
`overtaken_s` at most. So only shorter requests overtake one, and none that comes more than
`overtaken_s` later; a short one, none that comes more than `STRETCH` times its own seconds later.
Shortest first has the least mean wait (Smith, 1956); the bound keeps the longest waits as they are.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvist.router.protocol import Ask, Need, Refused

QUANTUM_TOKENS = 4096
OVERTAKEN_S = 6.0  # a default
STRETCH = 10.0  # seconds for which a request lets shorter ones pass, for each that it takes
_FULL_RETRY_S = 2.0


@dataclass(order=True, slots=True)
class _Entry:
    rank: tuple[int, float, float, int]
    ask: Ask = field(compare=False)
    need: Need = field(compare=False)
    waits: bool = field(compare=False, default=True)

    @property
    def cost_tokens(self) -> int:
        return max(1, self.need.new_tokens)


@dataclass(slots=True)
class _Tenant:
    heap: list[_Entry] = field(default_factory=list)
    waiting: int = 0
    deficit: float = 0.0

    def head(self) -> _Entry:
        """The next request; there is one."""
        while not self.heap[0].waits:
            heapq.heappop(self.heap)
        return self.heap[0]


class FairQueue:
    """One owner; reads no clock. Requests are named by `Ask.request`, which must differ."""

    def __init__(
        self,
        *,
        capacity: int,
        tenant_capacity: int,
        overtaken_s: float = 0.0,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """
        Args:
            capacity: most requests that wait.
            tenant_capacity: most of one tenant.
            overtaken_s: for how long later requests may overtake one; 0: they come in order.
            weights: shares of tenants, 1 where not given.

        Raises:
            ValueError: a weight that is not above 0.
        """
        self._weights = dict(weights or {})
        if any(not 0 < weight < math.inf for weight in self._weights.values()):
            raise ValueError(f"weights must be above 0 and finite, not {self._weights}")
        self._capacity = capacity
        self._tenant_capacity = tenant_capacity
        self._overtaken_s = overtaken_s
        self._ring: OrderedDict[str, _Tenant] = OrderedDict()  # the first one is at the cursor
        self._entries: dict[str, _Entry] = {}
        self._deadlines: list[tuple[float, int, _Entry]] = []
        self._came = 0
        self._work_s = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def work_s(self) -> float:
        """Seconds that those who wait would take of one replica."""
        return self._work_s

    def offer(self, ask: Ask, need: Need, now_s: float) -> Refused | None:
        """Lets a request wait; refused (`queue-full`) where there is no room.

        Args:
            need: what it would take now, at the replica that has most of it.
            now_s: when it came.

        Raises:
            ValueError: a request of that name waits already.
        """
        if ask.request in self._entries:
            raise ValueError(f"request {ask.request!r} waits already")
        tenant = self._ring.get(ask.tenant)
        if len(self._entries) >= self._capacity or (
            tenant is not None and tenant.waiting >= self._tenant_capacity
        ):
            return Refused("queue-full", _FULL_RETRY_S)
        if tenant is None:
            tenant = self._ring[ask.tenant] = _Tenant()
        self._came += 1
        deadline_s = math.inf if ask.deadline_s is None else ask.deadline_s
        passed_s = now_s + min(self._overtaken_s, STRETCH * need.serve_s)
        rank = -ask.priority, deadline_s, passed_s, self._came
        entry = _Entry(rank, ask, need)
        self._work_s += need.serve_s
        self._entries[ask.request] = entry
        heapq.heappush(tenant.heap, entry)
        tenant.waiting += 1
        if ask.deadline_s is not None:
            heapq.heappush(self._deadlines, (ask.deadline_s, self._came, entry))
        return None

    def take(self) -> Ask | None:
        """The next request, which waits no more; None where none waits.

        Call `expire` before, lest a request is served that is too late already.
        """
        if not self._ring:
            return None
        for _ in range(len(self._ring)):
            name, tenant = next(iter(self._ring.items()))
            if tenant.deficit >= tenant.head().cost_tokens:
                return self._send(tenant)
            tenant.deficit += self._quantum(name)
            if tenant.deficit >= tenant.head().cost_tokens:
                return self._send(tenant)
            self._ring.move_to_end(name)
        rounds = min(
            math.ceil((tenant.head().cost_tokens - tenant.deficit) / self._quantum(name))
            for name, tenant in self._ring.items()
        )
        for name, tenant in self._ring.items():
            tenant.deficit += (rounds - 1) * self._quantum(name)
        return self.take()

    def remove(self, request: str) -> bool:
        """Its user went away; False if it does not wait."""
        entry = self._entries.get(request)
        if entry is None:
            return False
        self._leave(entry)
        return True

    def expire(self, now_s: float) -> list[Ask]:
        """Takes out those whose deadline has passed, and returns them."""
        late: list[Ask] = []
        while self._deadlines and self._deadlines[0][0] < now_s:
            entry = heapq.heappop(self._deadlines)[2]
            if entry.waits:
                self._leave(entry)
                late.append(entry.ask)
        return late

    def _quantum(self, tenant: str) -> float:
        return QUANTUM_TOKENS * self._weights.get(tenant, 1.0)

    def _send(self, tenant: _Tenant) -> Ask:
        entry = tenant.head()
        tenant.deficit -= entry.cost_tokens
        self._leave(entry)
        if tenant.waiting and tenant.deficit < tenant.head().cost_tokens:
            self._ring.move_to_end(entry.ask.tenant)  # its visit is over
        return entry.ask

    def _leave(self, entry: _Entry) -> None:
        entry.waits = False
        self._work_s = self._work_s - entry.need.serve_s if len(self._entries) > 1 else 0.0
        del self._entries[entry.ask.request]
        tenant = self._ring[entry.ask.tenant]
        tenant.waiting -= 1
        if not tenant.waiting:
            del self._ring[entry.ask.tenant]
