"""Both media below DRAM pass the published suite."""

from __future__ import annotations

from pathlib import Path

from kvist.core.keys import Key
from kvist.testing.tier_suite import CAPACITY_BYTES, LowerTierSuite
from kvist.tiers.memory import MemoryTier, StoredBlock
from kvist.tiers.protocol import LowerTier
from kvist.tiers.ssd import FsyncMode, SsdTier


class TestMemoryTier(LowerTierSuite):
    def open_tier(self, directory: Path, capacity_bytes: int = CAPACITY_BYTES) -> LowerTier:
        medium = _MEDIA.setdefault(directory, {})
        return MemoryTier(capacity_bytes=capacity_bytes, medium=medium)


class TestSsdTier(LowerTierSuite):
    def open_tier(self, directory: Path, capacity_bytes: int = CAPACITY_BYTES) -> LowerTier:
        return SsdTier.open(
            directory, keyspace=bytes(32), capacity_bytes=capacity_bytes, fsync=FsyncMode.OFF
        )


class TestSsdTierWithFsync(LowerTierSuite):
    def open_tier(self, directory: Path, capacity_bytes: int = CAPACITY_BYTES) -> LowerTier:
        return SsdTier.open(directory, keyspace=bytes(32), capacity_bytes=capacity_bytes)


_MEDIA: dict[Path, dict[Key, StoredBlock]] = {}
