"""The directory's table in Python: the specification of `_core.OwnerTable`.

A key is known by its first 16 bytes. To each belongs a set of owners: a source (a small number that
the caller gives to a node) and the tiers that it has the block in, as bits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

TAG_BYTES = 16
MOST_SOURCES = 1 << 16

Owners = tuple[tuple[int, int], ...]  # (source, tiers), by ascending source


class OwnerTable:
    """Key → owners. Needs the caller's lock.

    Args:
        most_keys: above it, for a new key another goes that was not looked up lately.

    Raises:
        ValueError: it is below 1.
    """

    def __init__(self, most_keys: int) -> None:
        if most_keys < 1:
            raise ValueError("most_keys is at least 1")
        self._most_keys = most_keys
        self._owners: dict[bytes, Owners] = {}
        self._touched: set[bytes] = set()
        self.evicted = 0

    def __len__(self) -> int:
        """Keys that have an owner."""
        return len(self._owners)

    def add(self, source: int, tiers: int, keys: Sequence[bytes]) -> None:
        """A source has these blocks in these tiers (bits), too.

        Raises:
            ValueError: a key of less than 16 bytes, no tier, or a source or tiers out of range.
        """
        _check(source, tiers, keys)
        for key in keys:
            tag = key[:TAG_BYTES]
            before = self._owners.get(tag)
            if before is None:
                if len(self._owners) >= self._most_keys:
                    self._evict()
                self._owners[tag] = ((source, tiers),)
            else:
                bits = dict(before)
                bits[source] = bits.get(source, 0) | tiers
                self._owners[tag] = tuple(sorted(bits.items()))

    def remove(self, source: int, tiers: int, keys: Sequence[bytes]) -> None:
        """A source has these blocks in these tiers no more.

        Raises:
            ValueError: as `add`.
        """
        _check(source, tiers, keys)
        for key in keys:
            tag = key[:TAG_BYTES]
            before = self._owners.get(tag)
            if before is not None:
                self._put(tag, _without(before, source, tiers))

    def drop(self, source: int) -> None:
        """A source has nothing any more."""
        for tag, owners in list(self._owners.items()):
            self._put(tag, _without(owners, source, 0xFF))

    def find(self, key: bytes) -> list[tuple[int, int]]:
        """Owners of a key: (source, tiers), by ascending source."""
        found = self._owners.get(key[:TAG_BYTES])
        if found is None:
            return []
        self._touched.add(key[:TAG_BYTES])
        return list(found)

    def runs(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """For each source that has the first key: how many keys from there it has, without a gap.

        By ascending source.
        """
        reached: dict[int, int] = {}
        going: set[int] | None = None
        for n, key in enumerate(keys):
            tag = key[:TAG_BYTES]
            owners = {source for source, _ in self._owners.get(tag, ())}
            going = owners if going is None else going & owners
            if not going:
                break
            self._touched.add(tag)
            reached.update(dict.fromkeys(going, n + 1))
        return sorted(reached.items())

    def items(self) -> Iterator[tuple[bytes, list[tuple[int, int]]]]:
        """Every key's first 16 bytes and its owners, in any order."""
        for tag, owners in self._owners.items():
            yield tag, list(owners)

    @property
    def memory_bytes(self) -> int:
        """A rough estimate of what it takes."""
        each = sys.getsizeof(bytes(TAG_BYTES)) + sys.getsizeof(((0, 0),)) + sys.getsizeof((0, 0))
        sizes = sys.getsizeof(self._owners) + sys.getsizeof(self._touched)
        return sizes + len(self._owners) * each

    def _put(self, tag: bytes, owners: Owners) -> None:
        if owners:
            self._owners[tag] = owners
        else:
            del self._owners[tag]
            self._touched.discard(tag)

    def _evict(self) -> None:
        while True:
            tag = next(iter(self._owners))
            owners = self._owners.pop(tag)
            if tag not in self._touched:
                break
            self._touched.discard(tag)
            self._owners[tag] = owners  # goes to the end
        self.evicted += 1


def _without(owners: Owners, source: int, tiers: int) -> Owners:
    kept = ((s, bits & ~tiers if s == source else bits) for s, bits in owners)
    return tuple((s, bits) for s, bits in kept if bits)


def _check(source: int, tiers: int, keys: Sequence[bytes]) -> None:
    if not 0 <= source < MOST_SOURCES or not 0 < tiers < 1 << 8:
        raise ValueError("a source has 16 bits, tiers 8 and at least one")
    if any(len(key) < TAG_BYTES for key in keys):
        raise ValueError("a key is 16 bytes or more")
