"""What the parts of a store share: its lock, its table and the leases that are out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition, RLock
from typing import Protocol

from kvist.policy.filters import AdmitAll, InsertFilter
from kvist.store.entry import Entry, State
from kvist.store.outbox import Outbox
from kvist.store.table import BlockTable

WAKE_S = 0.5  # every wait looks again this often: a lost wake-up or a test's clock cannot hang it


class Holder(Protocol):
    """A lease, as the integrity check sees it."""

    def held(self) -> list[Entry]:
        """Entries that the lease counts a reference for."""
        ...


@dataclass(slots=True, eq=False)
class Desk:
    """One lock guards everything; three conditions on it say what changed.

    `changed`: a load or a write-back ended. `load_work`, `write_work`: there is something to do.
    """

    table: BlockTable
    outbox: Outbox
    clock: Callable[[], float]
    lock: RLock = field(default_factory=RLock)
    changed: Condition = field(init=False)
    load_work: Condition = field(init=False)
    write_work: Condition = field(init=False)
    leases: set[Holder] = field(default_factory=set)
    loads: OrderedDict[Entry, None] = field(default_factory=OrderedDict)  # queued, in order
    insert_filter: InsertFilter = field(default_factory=AdmitAll)  # of the tier below
    uses_come_at_end: bool = False  # a hint-taking order hears of uses when requests end

    def __post_init__(self) -> None:
        self.changed = Condition(self.lock)
        self.load_work = Condition(self.lock)
        self.write_work = Condition(self.lock)

    def use(self, entry: Entry) -> None:
        """A lease that used a resident block is over."""
        if entry.detached:
            return
        table = self.table
        if not self.uses_come_at_end:
            table.policy.touch(entry.key)
        if table.ages is not None:
            table.ages.use(entry.key)

    def filtered(self, entry: Entry, state: State) -> State:
        """`state`, or CLEAN if `entry` would be DIRTY but the insert filter refuses it.

        Asked before the order knows of the block.
        """
        if state is State.DIRTY and not self.insert_filter.admits(entry.key):
            entry.refused = True
            self.table.counters.filtered += 1
            return State.CLEAN
        return state

    def let_go(self, entry: Entry) -> None:
        """Drops one lease's reference; a load that nobody waits for and has not begun is off."""
        self.table.unref(entry)
        if entry.state is State.LOADING and entry.refs == 0 and not entry.busy:
            del self.loads[entry]
            self.table.fail(entry)
            self.table.counters.load_cancelled += 1
