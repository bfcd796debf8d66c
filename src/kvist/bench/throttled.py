"""A KvistConnector whose disk reads slowly, for measuring what a disk slower than computing costs.

Only reads are throttled, to `bench.read_bytes_per_s` of the connector's extra configuration: all of
them share that rate, as on one device. Writes go at full speed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from kvist.assemble import below
from kvist.connectors.vllm.connector import KvistConnector
from kvist.tiers.ssd import PosixIo, SsdTier

RATE_KNOB = "bench.read_bytes_per_s"


class ThrottledIo(PosixIo):
    """Reads take their turn and as long as their bytes take at the rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Reads, and returns when a device of that rate would."""
        done_bytes = super().preadv(fd, buffers, offset)
        with self._lock:
            self._free_at_s = max(time.monotonic(), self._free_at_s)
            self._free_at_s += done_bytes / self._bytes_per_s
            wait_s = self._free_at_s - time.monotonic()
        threading.Event().wait(max(0.0, wait_s))
        return done_bytes


class ThrottledConnector(KvistConnector):
    """As its parent, over `ThrottledIo`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        knobs = dict(transfer.kv_connector_extra_config)
        rate = float(knobs.pop(RATE_KNOB))

        class SlowTier(SsdTier):
            @classmethod
            def open(cls, *args: Any, **options: Any) -> SsdTier:
                return SsdTier.open(*args, io=ThrottledIo(rate), **options)

        whole, transfer.kv_connector_extra_config = transfer.kv_connector_extra_config, knobs
        try:
            with patch.object(below, "SsdTier", SlowTier):
                super().__init__(vllm_config, role, kv_cache_config)
        finally:
            transfer.kv_connector_extra_config = whole
