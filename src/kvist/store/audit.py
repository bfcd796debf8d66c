"""Proof that nothing leaks: what must hold whenever the store's lock is free."""

from __future__ import annotations

from collections import Counter

from kvist.core.errors import StoreError
from kvist.store.desk import Desk
from kvist.store.entry import Idle, State
from kvist.store.table import BlockTable


def check(desk: Desk) -> None:
    """Checks slots, references, order and queues; caller holds the lock.

    Raises:
        StoreError: names the first rule that is broken.
    """
    _check_slots(desk)
    _check_references(desk)
    _check_order(desk)
    _check_queues(desk)
    _check_tenants(desk.table)


def _demand(holds: bool, rule: str) -> None:  # noqa: FBT001 - an assertion's condition
    if not holds:
        raise StoreError(f"integrity: {rule}")


def _check_slots(desk: Desk) -> None:
    table, arena = desk.table, desk.table.arena
    owners = Counter(e.slot for e in (*table.entries.values(), *table.detached))
    used = {slot for slot in range(arena.capacity_slots) if arena.used(slot)}
    _demand(max(owners.values(), default=1) == 1, "a slot has two owners")
    _demand(used == set(owners), "a slot is taken but unowned, or owned but free")
    _demand(arena.free_slots == arena.capacity_slots - len(used), "the free list is off")


def _check_references(desk: Desk) -> None:
    table = desk.table
    held = Counter(e for lease in desk.leases for e in lease.held() if e.state is not State.FAILED)
    for entry in (*table.entries.values(), *table.detached):
        _demand(entry.refs == held.pop(entry, 0), "an entry's references are not its leases")
        _demand(entry.state is not State.FAILED, "a failed entry is in the table")
    _demand(not held, "a lease holds an entry that the store has lost")
    for key, entry in table.entries.items():
        _demand(entry.key == key and not entry.detached, "an entry stands under another key")
        _demand(entry.state is not State.WRITING or entry.refs == 1, "a write has no one lease")
    for entry in table.detached:
        _demand(entry.detached and (entry.refs > 0 or entry.busy), "a cleared entry is not held")


def _check_order(desk: Desk) -> None:
    table = desk.table
    resident = sorted(e.key for e in table.entries.values() if e.resident)
    _demand(len(table.policy) == len(resident), "the policy counts other keys than are resident")
    _demand(sorted(table.policy.victims()) == resident, "the policy orders other keys")
    _demand(sorted(table.resident) == resident, "`match` sees other keys than are resident")
    parents = Counter(e.parent for e in table.entries.values() if e.resident and e.parent)
    _demand(table.children == parents, "children are miscounted")


def _check_tenants(table: BlockTable) -> None:
    tenants = table.tenants
    if tenants is None:
        return
    entries = (*table.entries.values(), *table.detached)
    _demand(tenants.held == Counter(e.tenant for e in entries), "a tenant's slots are miscounted")
    for kind in (Idle.CLEAN, Idle.DIRTY):
        idle = Counter(e.tenant for e in entries if e.idle is kind)
        counted = {t: n for (t, k), n in tenants.idle.items() if k is kind and n}
        _demand(counted == idle, "what a tenant could give up is miscounted")


def _check_queues(desk: Desk) -> None:
    table = desk.table
    entries = table.entries.values()
    idle = Counter(e.idle for e in entries)
    for kind in (Idle.CLEAN, Idle.DIRTY):
        _demand(table.idle[kind] == idle[kind], "the count of evictable entries is off")
    dirty = {e for e in entries if e.state is State.DIRTY}
    _demand(set(table.dirty) == dirty, "the write queue is not the dirty entries")
    if table.ages is not None:
        unknown = [key for key in table.resident if key not in table.ages]
        _demand(not unknown, "a resident block has no age")
    for entry in (*entries, *table.detached):
        _demand(not (entry.refused and entry.state is State.DIRTY), "a refused block is dirty")
        if entry.state is State.LOADING:
            _demand(entry.busy != (entry in desk.loads), "a load is neither queued nor under way")
            _demand(entry.busy or entry.refs > 0, "a load is queued that nobody wants")
