"""KvistConnector whose worker fails every second load: for `test_load_failure.py` only."""

from __future__ import annotations

from typing import Any

from kvist.connectors.vllm.connector import KvistConnector
from kvist.connectors.vllm.copier import JobKind, Mover
from kvist.connectors.vllm.messages import CopyJob
from kvist.tiers.dram import ArenaLocator


class _EverySecondLoadFails:
    def __init__(self, inner: Mover) -> None:
        self._inner = inner
        self._loads = 0

    def move(self, kind: JobKind, job: CopyJob, *, wide: bool) -> int:
        if kind is JobKind.LOAD:
            self._loads += 1
            if self._loads % 2:
                raise OSError("the copy failed, as the test wants")
        return self._inner.move(kind, job, wide=wide)


class FaultyBlendConnector(KvistConnector):
    """Its worker fails in every blend, when half of it is done: for `test_blend.py` only."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """As the parent does, with a blender that fails."""
        super().register_kv_caches(kv_caches)
        make = self._worker._make_blender
        assert make is not None

        def make_faulty(locator: ArenaLocator) -> Any:
            blender = make(locator)
            blender._pages = None  # it can neither read nor write the engine's pages
            return blender

        self._worker._make_blender = make_faulty


class FaultyConnector(KvistConnector):
    """Wraps the mover that the worker side makes."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """As the parent does, with a mover that fails."""
        super().register_kv_caches(kv_caches)
        make = self._worker._movers._make_mover

        def make_faulty(locator: ArenaLocator) -> Mover:
            return _EverySecondLoadFails(make(locator))

        self._worker._movers._make_mover = make_faulty
