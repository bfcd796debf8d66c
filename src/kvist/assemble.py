"""Turns a configuration into objects; the only module that knows every implementation."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from kvist.config import Config, dram_bytes, ssd_bytes, ssd_folder
from kvist.core.errors import ConfigError
from kvist.core.events import KvEvent
from kvist.policy.leaf_lru import LeafLru
from kvist.policy.lru import Lru
from kvist.policy.protocol import EvictionPolicy
from kvist.store.breaker import Breaker
from kvist.store.tiered import TieredStore
from kvist.tiers.dram import Arena
from kvist.tiers.ssd import FsyncMode, SsdTier
from kvist.tiers.warmer import Warmer

_STUCK_S = 5.0  # a disk call that takes longer counts as failed
_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"leaf-lru": LeafLru, "lru": Lru}
_FSYNC = {"batch": FsyncMode.BATCH, "off": FsyncMode.OFF}


def open_embedded_store(
    config: Config,
    *,
    block_bytes: int,
    fingerprint: bytes,
    shard: str = "",
    on_event: Callable[[KvEvent], None] | None = None,
) -> TieredStore:
    """A store inside this process: a DRAM arena and, if enabled, an SSD tier that this owns.

    Args:
        config: the knobs.
        block_bytes: size of one canonical block.
        fingerprint: the keyspace's fingerprint (32 bytes), written into every frame.
        shard: subfolder of the SSD tier, for engines that keep stores of their own.
        on_event: gets every KV event.

    Raises:
        ConfigError: the DRAM tier holds no block.
        TierBusyError: another process owns the SSD folder.
        TierError: the SSD folder cannot be used.
    """
    capacity_bytes = dram_bytes(config)
    if capacity_bytes < block_bytes:
        raise ConfigError(
            f"{capacity_bytes} bytes do not hold one block of {block_bytes}",
            path="$.store.dram.capacity",
            remedy=f"give it at least {2 * block_bytes} bytes",
        )
    lower = _open_ssd(config, fingerprint, shard) if config.store.ssd.enabled else None
    knobs = config.store.breaker
    arena = Arena(capacity_bytes, slot_bytes=block_bytes)
    Warmer(arena, lambda: arena.touched_bytes).start()
    return TieredStore(
        arena,
        _POLICIES[config.store.dram.policy](),
        lower,
        raw_bytes=block_bytes,
        io_threads=config.store.io_threads,
        stuck_s=_STUCK_S,
        breaker=lambda: Breaker(
            window_s=knobs.window_s,
            threshold=knobs.failures,
            probe_s=knobs.open_s,
            clock=time.monotonic,
            random=random.random,
        ),
        events=on_event,
    )


def _open_ssd(config: Config, fingerprint: bytes, shard: str) -> SsdTier:
    ssd = config.store.ssd
    return SsdTier.open(
        ssd_folder(config) / shard if shard else ssd_folder(config),
        keyspace=fingerprint,
        capacity_bytes=ssd_bytes(config),
        segment_bytes=ssd.segment,
        fsync=_FSYNC[ssd.fsync],
    )
