"""Every storage adapter, and every layer around one, passes the published suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvist.adapters.files import FilesAdapter
from kvist.adapters.layers import (
    BreakerLayer,
    ChaosLayer,
    CountLayer,
    Layer,
    RetryLayer,
    ThrottleLayer,
    TimeoutLayer,
)
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


LAYERS: dict[str, Callable[[StorageAdapter], StorageAdapter]] = {
    "none": Layer,
    "retry": RetryLayer,
    "timeout": lambda inner: TimeoutLayer(inner, timeout_s=20.0),
    "throttle": lambda inner: ThrottleLayer(inner, bytes_per_s=1e9),
    "breaker": BreakerLayer,
    "count": CountLayer,
    "chaos": lambda inner: ChaosLayer(inner, seed=1, chances={}),
}


def all_layers(inner: StorageAdapter) -> StorageAdapter:
    """Each layer around the one before."""
    for name, wrap in LAYERS.items():
        inner = wrap(inner) if name != "all" else inner
    return inner


LAYERS["all"] = all_layers


class TestLayers(AdapterSuite):
    """Each layer over memory; one that nothing goes wrong under changes nothing."""

    @pytest.fixture(autouse=True, params=LAYERS)
    def _layer(self, request: pytest.FixtureRequest) -> None:
        self.wrap = LAYERS[request.param]

    def open_adapter(
        self, directory: Path, capacity_bytes: int | None = CAPACITY_BYTES
    ) -> StorageAdapter:
        medium = _MEDIA.setdefault(directory, MemoryMedium())
        return self.wrap(MemoryAdapter(medium, capacity_bytes=capacity_bytes))
