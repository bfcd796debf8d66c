"""Every medium below DRAM passes the published suite, the SSD tier with every way of I/O."""

from __future__ import annotations

from pathlib import Path

from kvist.adapters.files import FilesAdapter
from kvist.adapters.memory import MemoryAdapter, MemoryMedium
from kvist.adapters.protocol import StorageAdapter
from kvist.core.keys import Key
from kvist.testing.tier_suite import (
    BLOCK_BYTES,
    CAPACITY_BYTES,
    LowerTierSuite,
    read_block,
    suite_block,
    suite_key,
    suite_payload,
)
from kvist.tiers.memory import MemoryTier, StoredBlock
from kvist.tiers.protocol import LowerTier
from kvist.tiers.remote import RemoteTier
from kvist.tiers.ssd import EngineKind, FsyncMode, IoMode, SsdTier
from kvist.tiers.ssd.striped import StripedTier


class TestMemoryTier(LowerTierSuite):
    def open_tier(self, directory: Path, capacity_bytes: int = CAPACITY_BYTES) -> LowerTier:
        medium = _MEDIA.setdefault(directory, {})
        return MemoryTier(capacity_bytes=capacity_bytes, medium=medium)


class _SsdTierSuite(LowerTierSuite):
    kind = EngineKind.AUTO
    mode = IoMode.DIRECT

    def open_tier(self, directory: Path, capacity_bytes: int = CAPACITY_BYTES) -> LowerTier:
        return SsdTier.open(
            directory,
            keyspace=bytes(32),
            capacity_bytes=capacity_bytes,
            fsync=FsyncMode.OFF,
            mode=self.mode,
            engine=self.kind,
            depth=4,
        )


class TestSsdTier(_SsdTierSuite):
    pass


class TestSsdTierOnRingBuffered(_SsdTierSuite):
    kind, mode = EngineKind.URING, IoMode.BUFFERED


class TestSsdTierOnPoolDirect(_SsdTierSuite):
    kind, mode = EngineKind.POOL, IoMode.DIRECT


class TestSsdTierOnPoolBuffered(_SsdTierSuite):
    kind, mode = EngineKind.POOL, IoMode.BUFFERED


class TestSsdTierOnTwinDirect(_SsdTierSuite):
    kind, mode = EngineKind.TWIN, IoMode.DIRECT


class TestSsdTierOnTwinBuffered(_SsdTierSuite):
    kind, mode = EngineKind.TWIN, IoMode.BUFFERED


class TestStripedTier(LowerTierSuite):
    def open_tier(self, directory: Path, capacity_bytes: int = CAPACITY_BYTES) -> LowerTier:
        return StripedTier(
            [
                (
                    name,
                    SsdTier.open(
                        directory / name,
                        keyspace=bytes(32),
                        capacity_bytes=capacity_bytes,
                        fsync=FsyncMode.OFF,
                    ),
                    float(capacity_bytes),
                )
                for name in ("a", "b", "c")
            ]
        )

    def test_newest_blocks_stay_when_the_cap_is_exceeded(self, tier: LowerTier) -> None:
        """Each directory has the whole cap: three times as many blocks go in."""
        count = 6 * CAPACITY_BYTES // BLOCK_BYTES
        for i in range(count):
            tier.put([suite_payload(i)])
            assert tier.contains(suite_key(i))
        assert not tier.contains(suite_key(0))
        for i in range(count):
            assert read_block(tier, i) in (None, suite_block(i))
        tier.close()


class TestSsdTierWithFsync(LowerTierSuite):
    def open_tier(self, directory: Path, capacity_bytes: int = CAPACITY_BYTES) -> LowerTier:
        return SsdTier.open(directory, keyspace=bytes(32), capacity_bytes=capacity_bytes)


class TestRemoteTierOnMemory(LowerTierSuite):
    def open_tier(self, directory: Path, capacity_bytes: int = CAPACITY_BYTES) -> LowerTier:
        medium = _OBJECTS.setdefault(directory, MemoryMedium())
        return open_remote(MemoryAdapter(medium, capacity_bytes=capacity_bytes))


class TestRemoteTierOnFiles(LowerTierSuite):
    def open_tier(self, directory: Path, capacity_bytes: int = CAPACITY_BYTES) -> LowerTier:
        root = directory / "shared"
        return open_remote(FilesAdapter(root, capacity_bytes=capacity_bytes, grace_s=0.0))


def open_remote(adapter: StorageAdapter) -> LowerTier:
    """A remote tier that has learned what is there, as the suite expects of a disk."""
    tier = RemoteTier(adapter, keyspace=bytes(32))
    assert tier.wait_listed(20.0)
    return tier


_MEDIA: dict[Path, dict[Key, StoredBlock]] = {}
_OBJECTS: dict[Path, MemoryMedium] = {}
