"""From a block's key, or the beginning of one, to the blocks before it."""

from __future__ import annotations

from collections.abc import Iterator

from kvist.core.errors import StoreError
from kvist.core.keys import KEY_BYTES, Key
from kvist.store import survey
from kvist.store.desk import Desk
from kvist.store.link import LowerLink
from kvist.tiers.protocol import Lists

MOST_BLOCKS = 1 << 16  # of one prefix
_DIGITS = 2 * KEY_BYTES
_PASSES = 4  # over the medium: a parent may have been written after its child


def find(desk: Desk, link: LowerLink | None, digits: str, of: str | None) -> Key:
    """The only key that begins with `digits` (hex), among the blocks of tenant `of`.

    Raises:
        StoreError: there is none, or several.
        TierError: the medium failed.
    """
    none = StoreError(f"no block's key begins with {digits}; `kvist cache ls` shows what is there")
    if len(digits) == _DIGITS:
        key = bytes.fromhex(digits)
        with desk.lock:
            known = of is None or desk.table.owner(key) == of
            if known and survey.copies(desk, link, key):
                return key
        raise none
    found: Key | None = None
    for key in _keys(desk, link, of):
        if key.hex().startswith(digits) and key != found:
            if found is not None:
                raise StoreError(f"several keys begin with {digits}; give more digits")
            found = key
    if found is None:
        raise none
    return found


def prefix(desk: Desk, link: LowerLink | None, key: Key) -> list[Key]:
    """The block and those before it, as far as they are known, from the first on.

    Raises:
        TierError: the medium failed.
    """
    chain: dict[Key, None] = {key: None}
    wanted: Key | None = key
    while wanted is not None and len(chain) < MOST_BLOCKS:
        with desk.lock:
            entry = desk.table.entries.get(wanted)
            parent = entry.parent if entry is not None else None
        if parent is None:  # also where DRAM has a block of whose parent it was not told
            before = len(chain)
            wanted = _climb(link, wanted, chain)
            if len(chain) == before:
                break
            continue
        if parent in chain:
            break
        chain[parent] = None
        wanted = parent
    present = []
    for key in reversed(chain):
        with desk.lock:
            if survey.copies(desk, link, key):
                present.append(key)
    return present


def _climb(link: LowerLink | None, wanted: Key, chain: dict[Key, None]) -> Key | None:
    """Adds the ancestors of `wanted` that the medium names; returns the first it knows nothing of.

    Raises:
        TierError: the medium failed.
    """
    if link is None or not isinstance(link.tier, Lists):
        return None
    for _ in range(_PASSES):
        before = len(chain)
        for block in link.tier.list_blocks(newest_first=True):
            if block.key == wanted:
                if block.parent is None or block.parent in chain or len(chain) >= MOST_BLOCKS:
                    return None
                chain[block.parent] = None
                wanted = block.parent
        if len(chain) == before:
            break
    return wanted


def _keys(desk: Desk, link: LowerLink | None, of: str | None) -> Iterator[Key]:
    for block in survey.blocks(desk, link, of=of):
        yield block.key
