"""The table of owners in Python: the specification of `_core.OwnerTable`.

A key is known by its first 16 bytes. To each belongs a set of owners: a source (a small number that
the caller gives to a publisher) and the tiers that it has the block in, as bits.

A source may call blocks by names of its own, as stock engines do with hashes that mean nothing to
others. Such a source says which tokens are in a block; the key is computed from them and the name
remembered, until the source has the block in no tier. A name is known by its first 8 bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvist.core.keys import KEY_BYTES
from kvist.native.twin import chain_keys

if TYPE_CHECKING:
    from typing_extensions import Buffer

TAG_BYTES = 16
NAME_BYTES = 8
MOST_SOURCES = NOBODY = (1 << 16) - 1
MOST_TIERS = 1 << 16
MOST_LEVELS = 8
MOST_ENTRIES = 1 << 25

Readers = npt.NDArray[np.uint16]


@dataclass(slots=True, eq=False)
class _Entry:
    key: bytes
    owners: dict[int, int]  # source → tiers
    names: int = 0
    touched: bool = False


class OwnerTable:
    """Key → owners. The native one has a lock of its own; this one needs the caller's.

    Args:
        most_keys: above it, for a new key another goes that was not looked up lately.
        most_names: above it, for a new name another goes, and its source has that block no more.

    Raises:
        ValueError: one is below 1, or both together are 2**25 or more.
    """

    def __init__(self, most_keys: int, most_names: int = 1 << 24) -> None:
        if min(most_keys, most_names) < 1 or most_keys + most_names >= MOST_ENTRIES:
            raise ValueError("most_keys and most_names are 1 or more, and below 2**25 together")
        self._most_keys, self._most_names = most_keys, most_names
        self._entries: dict[bytes, _Entry] = {}  # of those without an owner, what a name leads to
        self._names: dict[tuple[int, bytes], _Entry] = {}
        self._owned = 0
        self.evicted = 0

    def __len__(self) -> int:
        """Keys that have an owner."""
        return self._owned

    @property
    def names(self) -> int:
        """Names that are remembered."""
        return len(self._names)

    def add(self, source: int, tiers: int, keys: Sequence[bytes]) -> None:
        """A source has these blocks in these tiers (bits), too; it may give names of its own.

        Raises:
            ValueError: a key of less than 16 bytes, no tier, or a source or tiers out of range.
        """
        _check(source, tiers, keys)
        for key in keys:
            named = self._names.get((source, key[:NAME_BYTES]))
            self._own(named or self._entry(key), source, tiers)

    def remove(self, source: int, tiers: int, keys: Sequence[bytes]) -> None:
        """A source has these blocks in these tiers no more; it may give names of its own.

        Raises:
            ValueError: as `add`.
        """
        _check(source, tiers, keys)
        for key in keys:
            named = self._names.get((source, key[:NAME_BYTES]))
            entry = named or self._entries.get(key[:TAG_BYTES])
            if entry is None:
                continue
            self._disown(entry, source, tiers)
            if named is not None and source not in entry.owners:
                self._unname(source, key[:NAME_BYTES])
            self._erase_unused(entry)

    def add_chain(
        self,
        source: int,
        tiers: int,
        names: Sequence[bytes],
        parent: bytes | None,
        seed: bytes,
        tokens: Buffer,
        block_tokens: int,
    ) -> bool:
        """A source has consecutive blocks that it names; their keys come from their tokens.

        Args:
            parent: the name or key of the block before the first; `None` where a prompt begins.
            seed: 32 bytes, where the chain begins if there is no parent.
            tokens: of all blocks, little-endian u32.
            block_tokens: tokens of a block.

        Returns:
            Whether the source has the parent; if not, nothing changes, as no key can be computed.

        Raises:
            ValueError: as `add`, or a seed or tokens of another length.
        """
        _check(source, tiers, names)
        words = np.frombuffer(memoryview(tokens), np.uint8)
        if len(seed) != KEY_BYTES:
            raise ValueError("seed is not 32 bytes")
        if block_tokens < 1 or len(words) != len(names) * block_tokens * 4:
            raise ValueError("tokens are 4 bytes each and block_tokens for each name")
        if parent is not None:
            _check(source, tiers, [parent])
        start = seed if parent is None else self._key_held(source, parent)
        if start is None:
            return False
        for name, key in zip(
            names, chain_keys(start, words.view("<u4"), block_tokens), strict=True
        ):
            entry = self._entry(key)
            self._own(entry, source, tiers)
            called = (source, name[:NAME_BYTES])
            if name[:TAG_BYTES] == key[:TAG_BYTES] or called in self._names:
                continue
            self._names[called] = entry
            entry.names += 1
            if len(self._names) > self._most_names:
                self._evict_name()
        return True

    def drop(self, source: int) -> None:
        """A source has nothing any more, and its names mean nothing.

        Raises:
            ValueError: it is out of range.
        """
        _check(source, 1, ())
        for called in [c for c in self._names if c[0] == source]:
            self._unname(*called)
        self._take_away({source}, MOST_TIERS - 1)

    def fade(self, tiers: int) -> None:
        """No source has anything in these tiers any more.

        Raises:
            ValueError: no tier, or tiers out of range.
        """
        _check(0, tiers, ())
        self._take_away(None, tiers)

    def find(self, key: bytes) -> list[tuple[int, int]]:
        """Owners of a key: (source, tiers), by ascending source."""
        return sorted(self._looked_up(key).items())

    def runs(self, keys: Sequence[bytes], tiers: int = MOST_TIERS - 1) -> list[tuple[int, int]]:
        """For each source that has the first key: how many keys from there it has, without a gap.

        By ascending source. Only those in some of `tiers` (bits) count.

        Raises:
            ValueError: no tier, or tiers out of range.
        """
        _check(0, tiers, ())
        if not keys:
            return []
        sources = [source for source, _ in self.find(keys[0])]
        readers = np.array([(source, NOBODY) for source in sources], np.uint16).reshape(-1, 2)
        found = self.reach(keys, readers, [tiers])
        return [(sources[reader], run) for reader, run in found]

    def reach(
        self, keys: Sequence[bytes], readers: Readers, levels: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """How many keys each reader has from the first on, without a gap, at each level.

        Args:
            readers: (readers, 2) sources whose blocks a reader sees, 65535 for none.
            levels: for each level, the tiers (bits) that count; one to eight.

        Returns:
            Readers that have anything: their row and a run for each level, by ascending row.

        Raises:
            ValueError: a number of levels that is out of range.
        """
        if not 1 <= len(levels) <= MOST_LEVELS:
            raise ValueError("levels are 1 to 8")
        runs = {row: [0] * len(levels) for row in range(len(readers))}
        going = {(row, level) for row in runs for level in range(len(levels))}
        for key in keys:
            owners = self._looked_up(key)
            for row, level in list(going):
                tiers = [owners.get(int(source), 0) for source in readers[row]]
                if (tiers[0] | tiers[1]) & levels[level]:
                    runs[row][level] += 1
                else:
                    going.discard((row, level))
            if not going:
                break
        return [(row, *run) for row, run in runs.items() if any(run)]

    def reach_many(
        self, requests: Iterable[Sequence[bytes]], readers: Readers, levels: Sequence[int]
    ) -> list[list[tuple[int, ...]]]:
        """`reach` for each request; the native one lets other threads run meanwhile."""
        return [self.reach(keys, readers, levels) for keys in requests]

    def items(self) -> Iterator[tuple[bytes, list[tuple[int, int]]]]:
        """Every key's first 16 bytes and its owners, in any order."""
        for tag, entry in list(self._entries.items()):
            if entry.owners:
                yield tag, sorted(entry.owners.items())

    @property
    def memory_bytes(self) -> int:
        """A rough estimate of what it takes."""
        each = sys.getsizeof(bytes(KEY_BYTES)) + sys.getsizeof({0: 0}) + sys.getsizeof(b"")
        sizes = sys.getsizeof(self._entries) + sys.getsizeof(self._names)
        return sizes + len(self._entries) * each

    def _looked_up(self, key: bytes) -> dict[int, int]:
        _check(0, 1, [key])
        entry = self._entries.get(key[:TAG_BYTES])
        if entry is None:
            return {}
        entry.touched = True
        return entry.owners

    def _key_held(self, source: int, key: bytes) -> bytes | None:
        """The key of a block that a source has, by its name or by the whole key."""
        named = self._names.get((source, key[:NAME_BYTES]))
        entry = named or self._entries.get(key[:TAG_BYTES])
        if entry is None or source not in entry.owners:
            return None
        whole = len(key) == KEY_BYTES and entry.key == key
        return entry.key if named is not None or whole else None

    def _entry(self, key: bytes) -> _Entry:
        tag = key[:TAG_BYTES]
        entry = self._entries.get(tag)
        if entry is None or not entry.owners:
            while self._owned >= self._most_keys:
                self._evict()
            entry = self._entries.setdefault(tag, _Entry(key[:KEY_BYTES], {}))
        return entry

    def _own(self, entry: _Entry, source: int, tiers: int) -> None:
        self._owned += not entry.owners
        entry.owners[source] = entry.owners.get(source, 0) | tiers

    def _disown(self, entry: _Entry, source: int, tiers: int) -> None:
        before = entry.owners.get(source, 0)
        if before & ~tiers:
            entry.owners[source] = before & ~tiers
        elif before:
            del entry.owners[source]
            self._owned -= not entry.owners

    def _take_away(self, sources: set[int] | None, tiers: int) -> None:
        for entry in list(self._entries.values()):
            for source in list(entry.owners) if sources is None else sources:
                self._disown(entry, source, tiers)
            self._erase_unused(entry)

    def _unname(self, source: int, name: bytes) -> None:
        entry = self._names.pop((source, name))
        entry.names -= 1
        self._erase_unused(entry)

    def _erase_unused(self, entry: _Entry) -> None:
        if not entry.owners and not entry.names:
            self._entries.pop(entry.key[:TAG_BYTES], None)

    def _evict(self) -> None:
        while True:
            tag = next(iter(self._entries))
            entry = self._entries.pop(tag)
            self._entries[tag] = entry  # goes to the end
            if entry.owners and not entry.touched:
                break
            entry.touched = False
        self._owned -= 1
        entry.owners.clear()
        self._erase_unused(entry)
        self.evicted += 1

    def _evict_name(self) -> None:
        source, name = next(iter(self._names))
        self._disown(self._names[source, name], source, MOST_TIERS - 1)
        self._unname(source, name)
        self.evicted += 1


def _check(source: int, tiers: int, keys: Iterable[bytes]) -> None:
    if not 0 <= source < MOST_SOURCES or not 0 < tiers < MOST_TIERS:
        raise ValueError("a source is below 65535, tiers have 16 bits and at least one")
    if any(len(key) < TAG_BYTES for key in keys):
        raise ValueError("a key is 16 bytes or more")
