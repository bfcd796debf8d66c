"""A store inside this process."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

from kvist.assemble.below import open_below
from kvist.config import Config, dram_bytes
from kvist.core.errors import ConfigError, LayoutError
from kvist.core.events import KvEvent
from kvist.core.layout import BlockLayout
from kvist.policy import (
    AdmitAll,
    Arc,
    ByValue,
    EvictionPolicy,
    Fifo,
    Gdsf,
    InsertFilter,
    LeafLru,
    Lirs,
    Lru,
    S3Fifo,
    SecondSight,
    Sieve,
    Value,
    WTinyLfu,
)
from kvist.store.breaker import Breaker
from kvist.store.quota import OTHERS, Quota
from kvist.store.succession import Legacy
from kvist.store.tiered import TieredStore
from kvist.tiers.borrowing import Lender
from kvist.tiers.dram import Arena
from kvist.tiers.warmer import Warmer

_REMEMBERED_CAPACITIES = 8
_STUCK_S = 5.0  # a disk call that takes longer counts as failed
# Each gets the blocks that the DRAM tier holds.
_POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "arc": Arc,
    "fifo": lambda _: Fifo(),
    "gdsf": lambda _: Gdsf(),
    "leaf-lru": lambda _: LeafLru(),
    "lirs": Lirs,
    "lru": lambda _: Lru(),
    "s3-fifo": S3Fifo,
    "sieve": lambda _: Sieve(),
    "value": lambda _: Value(time.monotonic),
    "w-tinylfu": WTinyLfu,
}


def open_embedded_store(
    config: Config,
    *,
    block_bytes: int,
    fingerprint: bytes,
    layout: BlockLayout | None = None,
    shard: str = "",
    on_event: Callable[[KvEvent], None] | None = None,
    lender: Callable[[], Lender | None] | None = None,
    legacy: Legacy | None = None,
) -> TieredStore:
    """A store inside this process: a DRAM arena and, if enabled, an SSD tier that this owns.

    Args:
        config: the knobs.
        block_bytes: size of one canonical block.
        fingerprint: the keyspace's fingerprint (32 bytes), written into every frame.
        layout: what a block looks like; codecs other than `raw` and `aead` need it.
        shard: subfolder of the SSD tier, for engines that keep stores of their own.
        on_event: gets every KV event.
        lender: opens what other hosts have and this store may read, if there is any.
        legacy: a former process's arena that fits, to take over; the caller's, if this fails.

    Raises:
        ConfigError: the DRAM tier holds no block, the insert filter does not fit the order, or the
            codec cannot be had: no such one, not for this layout, without keys or its package.
        LayoutError: `layout` is one of blocks of another size.
        TierBusyError: another process owns the SSD folder.
        TierError: the SSD folder cannot be used.
    """
    if layout is not None and layout.block_bytes != block_bytes:
        raise LayoutError(f"{layout} is one of blocks of {layout.block_bytes} bytes")
    capacity_bytes = dram_bytes(config)
    if capacity_bytes < block_bytes:
        raise ConfigError(
            f"{capacity_bytes} bytes do not hold one block of {block_bytes}",
            path="$.store.dram.capacity",
            remedy=f"give it at least {2 * block_bytes} bytes",
        )
    capacity_blocks = capacity_bytes // block_bytes
    policy = _POLICIES[config.store.dram.policy](capacity_blocks)
    insert_filter = _insert_filter(config, policy, capacity_blocks)
    lower, lower_tier = open_below(config, fingerprint, shard, layout, lender)
    knobs = config.store.breaker
    arena = _arena(capacity_bytes, block_bytes, legacy)
    store = TieredStore(
        arena,
        policy,
        lower,
        raw_bytes=block_bytes,
        io_threads=config.store.io_threads,
        lower_tier=lower_tier,
        stuck_s=_STUCK_S,
        breaker=lambda: Breaker(
            window_s=knobs.window_s,
            threshold=knobs.failures,
            probe_s=knobs.open_s,
            clock=time.monotonic,
            random=random.random,
        ),
        events=on_event,
        ttl_s=config.store.ttl_s or None,
        quota=_quota(config),
        insert_filter=insert_filter,
        restore_blocks=0 if legacy else int(config.store.dram.restore * capacity_blocks),
    )
    if legacy is not None:
        store.succession.inherit(legacy.estate, legacy.fences)
        os.close(legacy.fd)
    return store


def _arena(capacity_bytes: int, block_bytes: int, legacy: Legacy | None) -> Arena:
    """An arena that is warmed ahead, of new memory or that of `legacy`."""
    memory = None if legacy is None else os.dup(legacy.fd)
    arena = Arena(capacity_bytes, slot_bytes=block_bytes, fd=memory)
    Warmer(arena, lambda: arena.touched_bytes).start()
    return arena


def _quota(config: Config) -> Quota:
    shares = config.store.tenant_quota
    if not isinstance(shares, dict):
        return Quota(shares)
    named = {tenant: share for tenant, share in shares.items() if tenant != OTHERS}
    return Quota(shares.get(OTHERS, 1.0), named)


def _insert_filter(config: Config, policy: EvictionPolicy, capacity_blocks: int) -> InsertFilter:
    """What may be written to the SSD tier.

    Raises:
        ConfigError: the filter needs an eviction order that the DRAM tier does not have.
    """
    kind = config.store.ssd.insert
    if kind == "second-sight":
        return SecondSight(_REMEMBERED_CAPACITIES * capacity_blocks)
    if kind == "value":
        if not isinstance(policy, Value):
            raise ConfigError(
                f"needs the eviction order value, not {config.store.dram.policy}",
                path="$.store.ssd.insert",
                remedy="set store.dram.policy=value, or another filter",
            )
        return ByValue(policy)
    return AdmitAll()
