"""Forgetting blocks on demand, and keeping them: evict, clear, pin."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from kvist.core.events import Cleared, Removed
from kvist.core.keys import Key
from kvist.core.outcome import Tier
from kvist.store.desk import Desk
from kvist.store.entry import Idle
from kvist.store.link import Clearable, LowerLink


def evict(desk: Desk, link: LowerLink | None, keys: Iterable[Key], *, of: str | None = None) -> int:
    """Forgets blocks in every tier, only those of tenant `of` if given; see `TieredStore.evict`."""
    table = desk.table
    with desk.lock:
        dropped: list[Key] = []
        below: list[Key] = []
        for key in dict.fromkeys(keys):
            if of is not None and table.owner(key) != of:
                continue  # another's block and one that is nowhere are not told apart
            entry = table.entries.get(key)
            if entry is not None:
                if entry.idle is Idle.NO:
                    continue
                table.drop(entry)
                dropped.append(key)
            if link is not None and link.tier.contains(key):
                below.append(key)
            table.owners.forget((key,))
            if table.ages is not None:
                table.ages.forget(key)
        if dropped:
            desk.outbox.put(Removed(tuple(dropped), Tier.DRAM))
    if below and link is not None:
        link.demand("remove", partial(link.tier.remove, below))
        desk.outbox.put(Removed(tuple(below), link.name))
    desk.outbox.drain()
    return len({*dropped, *below})


def clear(desk: Desk, link: LowerLink | None) -> None:
    """Forgets everything; see `TieredStore.clear`."""
    with desk.lock:
        dropped = desk.table.detach_all()
        desk.outbox.put(Cleared())
    desk.outbox.drain()
    if link is None:
        return
    if isinstance(link.tier, Clearable):
        link.demand("clear", link.tier.clear)
    else:
        link.demand("remove", partial(link.tier.remove, dropped))


def set_pinned(desk: Desk, keys: Iterable[Key], *, pinned: bool, of: str | None = None) -> int:
    """Pins or unpins what is in DRAM; says how many changed. Either counts as a use.

    Only blocks of tenant `of`, if one is given.
    """
    changed = 0
    table = desk.table
    with desk.lock:
        for key in keys:
            if of is not None and table.owner(key) != of:
                continue
            entry = table.entries.get(key)
            if entry is not None and entry.resident and entry.pinned is not pinned:
                entry.pinned = pinned
                table.settle(entry)
                if table.ages is not None:
                    table.ages.use(key)
                changed += 1
    return changed
