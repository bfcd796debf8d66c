"""Answers the requests of `messages.py`: which keyspace, whose blocks, and lists page by page.

A list is an iterator that lives here between two pages, so that no more of it is in memory than a
segment's footer and the keys of DRAM. A few may be open at once; one that nobody goes on with is
dropped, and so is the oldest when one more is begun. A cursor is random, and is good for the
request that began it alone: of the same keyspace, the same tenant, the same kind.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import msgspec

from kvist.core.errors import ClosedError, KvistError, NoSpaceError, StoreError
from kvist.core.layout import BlockLayout
from kvist.core.outcome import Tier
from kvist.node.cache import messages as m
from kvist.node.keyspaces import Attach, Keyspace
from kvist.store.caretaker import Caretaker, Done, Run
from kvist.store.stats import BlockInfo

MOST_LISTS = 16
LIST_S = 60.0  # a list that nobody goes on with is over
_CURSOR_BYTES = 16
_SHORT = 12


@dataclass(slots=True)
class _Listing:
    """A list that has begun; `scope` is what a request must name to go on with it."""

    scope: tuple[object, ...]
    items: Iterator[Any]
    until: float


class CacheDesk:
    """The lists that are open, and nothing else. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds that only grow."""
        self._clock = clock
        self._lock = threading.Lock()
        self._listings: OrderedDict[str, _Listing] = OrderedDict()

    @property
    def lists(self) -> int:
        """How many lists are open."""
        return len(self._listings)

    def answer(self, keyspaces: Sequence[Keyspace], request: m.Request) -> m.Reply:
        """Carries out one request; may wait for a medium, and as long as the request says."""
        try:
            if isinstance(request, m.ShowKeyspaces):
                return m.Keyspaces(tuple(_shown_keyspace(keyspace) for keyspace in keyspaces))
            keyspace = _find(keyspaces, request.keyspace)
            return self._answer(keyspace, keyspace.store.caretaker, request)
        except (NoSpaceError, ClosedError, OSError) as error:  # a TierError is an OSError
            return m.Denied("store", str(error)[:2000])
        except StoreError as error:
            return m.Denied("request", str(error)[:2000])

    def expire(self) -> None:
        """Drops the lists whose time is over."""
        now = self._clock()
        with self._lock:
            for cursor in [c for c, found in self._listings.items() if found.until <= now]:
                del self._listings[cursor]

    def _answer(self, keyspace: Keyspace, care: Caretaker, request: m.Request) -> m.Reply:
        of, name = request.tenant, keyspace.attach.fingerprint.hex()
        if isinstance(request, m.ListRuns | m.ListBlocks):
            return self._page(keyspace, care, request)
        if isinstance(request, m.ShowUsage):
            held = care.usage(of)
            rows = tuple(
                m.TenantUsage(_place(h.tier), h.tenant, h.blocks, h.size_bytes, h.pinned_blocks)
                for h in held[: m.MOST_TENANTS]
            )
            return m.Usage(name, rows, len(held) - len(rows))
        if isinstance(request, m.PinBlocks):
            return _changed(care.pin(_keys(request.keys), of))
        if isinstance(request, m.UnpinBlocks):
            return _changed(care.unpin(_keys(request.keys), of))
        if isinstance(request, m.EvictBlocks):
            return _changed(care.evict(_keys(request.keys), of))
        if isinstance(request, m.MoveBlocks):
            return _changed(_move(care, request))
        assert isinstance(request, m.ClearBlocks)
        return m.Cleared(*care.clear(of, deadline_s=request.deadline_s))

    def _page(
        self, keyspace: Keyspace, care: Caretaker, request: m.ListRuns | m.ListBlocks
    ) -> m.Reply:
        fingerprint = keyspace.attach.fingerprint
        scope = (type(request), fingerprint, id(keyspace.store), request.tenant, request.tier)
        listing = self._resume(request.cursor, scope)
        if listing is None:
            listing = _Listing(scope, _begin(care, request), 0.0)
        items = list(islice(listing.items, request.limit))
        cursor = self._keep(listing) if len(items) == request.limit else ""
        name, raw_bytes = fingerprint.hex(), keyspace.attach.block_bytes
        if isinstance(request, m.ListRuns):
            return m.RunPage(name, tuple(map(_shown_run, items)), cursor)
        blocks = tuple(_shown_block(block, raw_bytes) for block in items)
        return m.BlockPage(name, blocks, cursor)

    def _resume(self, cursor: str, scope: tuple[object, ...]) -> _Listing | None:
        """The list behind a cursor, which nobody else has meanwhile; `None` without a cursor."""
        if not cursor:
            return None
        self.expire()
        with self._lock:
            listing = self._listings.get(cursor)
            if listing is None or listing.scope != scope:
                raise StoreError(f"the list {cursor} is over, or was never begun; begin a new one")
            del self._listings[cursor]
            return listing

    def _keep(self, listing: _Listing) -> str:
        cursor = secrets.token_hex(_CURSOR_BYTES)
        listing.until = self._clock() + LIST_S
        with self._lock:
            self._listings[cursor] = listing
            if len(self._listings) > MOST_LISTS:
                self._listings.popitem(last=False)
        return cursor


def _find(keyspaces: Sequence[Keyspace], digits: str) -> Keyspace:
    found = [k for k in keyspaces if k.attach.fingerprint.hex().startswith(digits)]
    if len(found) == 1:
        return found[0]
    if not keyspaces:
        raise StoreError("no keyspace is open: an engine opens its own when it attaches")
    names = ", ".join(k.attach.fingerprint.hex()[:_SHORT] for k in keyspaces)
    what = "several keyspaces are open" if len(found) > 1 else f"no keyspace {digits} is open"
    raise StoreError(f"{what}: name one of {names}")


def _begin(care: Caretaker, request: m.ListRuns | m.ListBlocks) -> Iterator[Any]:
    tier = Tier(request.tier) if request.tier else None
    if isinstance(request, m.ListRuns):
        return care.runs(tier, request.tenant)
    if request.ending:
        return care.prefix(request.ending, tier, request.tenant, alone=request.alone)
    return care.blocks(tier, request.tenant)


def _move(care: Caretaker, request: m.MoveBlocks) -> Done:
    keys = _keys(request.keys)
    if request.parents and len(request.parents) != len(keys):
        raise StoreError(f"{len(keys)} keys with {len(request.parents)} parents")
    if request.to == "ssd":
        return care.demote(keys, request.tenant, deadline_s=request.deadline_s)
    parents = [bytes.fromhex(p) if p else None for p in request.parents] or [None] * len(keys)
    return care.promote(keys, parents, request.tenant, deadline_s=request.deadline_s)


def _keys(digits: Iterable[str]) -> list[bytes]:
    return [bytes.fromhex(key) for key in digits]


def _place(tier: Tier) -> m.Place:
    return cast(m.Place, tier.value)


def _changed(done: Done) -> m.Changed:
    return m.Changed(done.changed, done.present, done.left)


def _shown_keyspace(keyspace: Keyspace) -> m.OpenKeyspace:
    attach = keyspace.attach
    return m.OpenKeyspace(
        attach.fingerprint.hex(), attach.block_bytes, _block_tokens(attach), len(keyspace.sessions)
    )


def _block_tokens(attach: Attach) -> int:
    try:
        return msgspec.json.decode(attach.layout or "", type=BlockLayout).block_tokens
    except (msgspec.MsgspecError, KvistError):
        return 0


def _shown_run(run: Run) -> m.ShownRun:
    return m.ShownRun(
        run.first.hex(),
        run.last.hex(),
        _place(run.tier),
        run.tenant,
        run.blocks,
        run.size_bytes,
        run.pinned_blocks,
        run.leased_blocks,
        run.age_s,
    )


def _shown_block(block: BlockInfo, raw_bytes: int) -> m.ShownBlock:
    return m.ShownBlock(
        block.key.hex(),
        block.parent.hex() if block.parent else None,
        _place(block.tier),
        block.tenant,
        block.size_bytes or raw_bytes,
        block.state.value,
        block.pinned,
        block.refs > 0,
        block.age_s,
    )
