"""Every storage adapter, and every layer around one, passes the published suite."""

from __future__ import annotations

from pathlib import Path

from kvist.adapters.files import FilesAdapter
from kvist.adapters.memory import MemoryAdapter, MemoryMedium
from kvist.adapters.protocol import StorageAdapter
from kvist.testing.adapter_suite import CAPACITY_BYTES, AdapterSuite

_MEDIA: dict[Path, MemoryMedium] = {}


class TestMemoryAdapter(AdapterSuite):
    def open_adapter(
        self, directory: Path, capacity_bytes: int | None = CAPACITY_BYTES
    ) -> StorageAdapter:
        medium = _MEDIA.setdefault(directory, MemoryMedium())
        return MemoryAdapter(medium, capacity_bytes=capacity_bytes)


class TestFilesAdapter(AdapterSuite):
    def open_adapter(
        self, directory: Path, capacity_bytes: int | None = CAPACITY_BYTES
    ) -> StorageAdapter:
        return FilesAdapter(directory / "shared", capacity_bytes=capacity_bytes, grace_s=0.0)
