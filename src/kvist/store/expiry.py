"""Expiry: drops the blocks whose time-to-live is over, in both tiers.

Calls of the store sweep a bounded number; the writer thread sweeps now and then and removes below
what has expired, so that a removal and a write of one key never overlap. A block that is leased,
pinned or moving is in use, so its age begins anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvist.core.events import Removed
from kvist.core.keys import Key
from kvist.core.outcome import Tier
from kvist.store.ages import Ages
from kvist.store.desk import Desk
from kvist.store.entry import Idle, State
from kvist.store.link import LowerLink


def sweep(desk: Desk, link: LowerLink | None) -> None:
    """Drops what has expired, a bounded number of blocks; caller holds the lock."""
    ages = desk.table.ages
    if ages is None or not ages.overdue():
        return
    for key in ages.expired():
        _expire(desk, link, ages, key)


def is_live(desk: Desk, link: LowerLink | None, key: Key) -> bool:
    """Whether `key` may be given out; drops it if its time is over. Caller holds the lock."""
    ages = desk.table.ages
    return ages is None or ages.live(key) or not _expire(desk, link, ages, key)


def cut(desk: Desk, link: LowerLink | None, keys: Sequence[Key]) -> int:
    """How many of `keys`, which are present, come before the first that has expired.

    Takes the lock only for a key that looks expired.
    """
    ages = desk.table.ages
    if ages is None:
        return len(keys)
    run = 0
    while True:
        run += ages.live_run(keys[run:])
        if run == len(keys):
            return run
        with desk.lock:
            if not is_live(desk, link, keys[run]):
                return run
        run += 1


def _expire(desk: Desk, link: LowerLink | None, ages: Ages, key: Key) -> bool:
    """Drops a key whose time is over; false, and it lives on, if somebody holds it."""
    table = desk.table
    entry = table.entries.get(key)
    if entry is not None and entry.state is State.WRITING:
        return True  # what is below is old, and the new block not there yet
    if entry is not None and entry.idle is Idle.NO:
        ages.use(key)
        return False
    if entry is not None:
        table.drop(entry)
        table.outbox.put(Removed((key,), Tier.DRAM))
        desk.changed.notify_all()  # a flush may have waited for it
    doomed = link is not None and link.tier.contains(key) and ages.doom(key)
    ages.forget(key)
    table.owners.forget((key,))
    if doomed:
        desk.write_work.notify()
    table.counters.expired += doomed or entry is not None
    return True
