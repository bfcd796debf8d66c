"""Shares of DRAM by tenant: how many slots each may hold, holds, and could give up.

A slot counts as that of the tenant who first wrote the block, or who first brought it up from
below, until the slot is free again; others read it at no charge. The empty name is a tenant too:
that of all requests that name none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvist.store.entry import Entry, Idle

OTHERS = "*"  # in a mapping of shares: every tenant that it does not name


@dataclass(frozen=True, slots=True)
class Quota:
    """Fractions of the DRAM tier by tenant; `others` is that of every tenant not in `shares`."""

    others: float = 1.0
    shares: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not all(0 < share <= 1 for share in (self.others, *self.shares.values())):
            raise ValueError("a tenant's share must be above 0 and at most 1")

    @property
    def limits(self) -> bool:
        """Whether it limits anybody."""
        return any(share < 1 for share in (self.others, *self.shares.values()))

    def most_blocks(self, tenant: str, capacity_blocks: int) -> int:
        """Slots that `tenant` may hold; one at least."""
        return max(1, int(self.shares.get(tenant, self.others) * capacity_blocks))


class Tenants:
    """Counts by tenant. Guarded by the store's lock."""

    def __init__(self, quota: Quota, capacity_blocks: int) -> None:
        self._quota = quota
        self._capacity_blocks = capacity_blocks
        self.held: Counter[str] = Counter()
        self.idle: Counter[tuple[str, Idle]] = Counter()

    def take(self, entry: Entry) -> None:
        """`entry` has got a slot."""
        self.held[entry.tenant] += 1

    def give(self, entry: Entry) -> None:
        """`entry` has lost its slot."""
        self.held[entry.tenant] -= 1
        if not self.held[entry.tenant]:  # names come from clients: keep none that holds nothing
            del self.held[entry.tenant]
            for kind in Idle:
                self.idle.pop((entry.tenant, kind), None)

    def change(self, entry: Entry, idle: Idle) -> None:
        """`entry` goes from `entry.idle` to `idle`."""
        self.idle[entry.tenant, entry.idle] -= 1
        self.idle[entry.tenant, idle] += 1

    def excess(self, tenant: str, count: int) -> int:
        """Blocks that `tenant` must give up to get `count` more; not positive where none."""
        most = self._quota.most_blocks(tenant, self._capacity_blocks)
        return self.held[tenant] + count - most

    def spare(self, tenant: str, droppable: Sequence[Idle]) -> int:
        """Blocks that `tenant` could give up."""
        return sum(self.idle[tenant, kind] for kind in droppable)

    def room(self, tenant: str, droppable: Sequence[Idle]) -> int:
        """Blocks that `tenant` could get, were DRAM empty of others."""
        return self.spare(tenant, droppable) - self.excess(tenant, 0)
