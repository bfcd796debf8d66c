"""Turns a configuration into objects; the only module that knows every implementation."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from kvist.codec.keyring import read_keyring
from kvist.codec.registry import CodecRegistry, open_codecs
from kvist.config import Config, as_mapping, dram_bytes, knobs, ssd_bytes, ssd_folders
from kvist.core.errors import ConfigError, LayoutError, NodeAwayError, TierBusyError, TierError
from kvist.core.events import KvEvent
from kvist.core.layout import BlockLayout
from kvist.node import control
from kvist.node.client import NodeStore
from kvist.node.keyspaces import Attach, OpenStore
from kvist.node.place import Place, default_socket
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
from kvist.store.tiered import TieredStore
from kvist.tiers.dram import Arena
from kvist.tiers.protocol import LowerTier
from kvist.tiers.ssd import EngineKind, FsyncMode, IoMode, SsdTier
from kvist.tiers.ssd.striped import StripedTier
from kvist.tiers.warmer import Warmer

_log = logging.getLogger(__name__)
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
_FSYNC = {"batch": FsyncMode.BATCH, "off": FsyncMode.OFF}


def open_store(
    config: Config,
    *,
    block_bytes: int,
    fingerprint: bytes,
    layout: BlockLayout | None = None,
    shard: str = "",
    on_event: Callable[[KvEvent], None] | None = None,
) -> TieredStore | NodeStore:
    """The store that the configuration asks for: inside this process, or the node's.

    Args:
        config: the knobs.
        block_bytes: size of one canonical block.
        fingerprint: the keyspace's fingerprint (32 bytes).
        layout: what a block looks like; engines that share a node must agree on it.
        shard: see `open_embedded_store`; the engines of a node share one store.
        on_event: gets every KV event.

    Raises:
        ConfigError: the configuration cannot be used.
        NodeAwayError: no node listens, and none could be started.
        NodeRefusedError: the node does not want this engine, and says why.
        TierError: the SSD folder cannot be used, or belongs to another process.
    """
    if config.store.where == "embedded":
        return open_embedded_store(
            config,
            block_bytes=block_bytes,
            fingerprint=fingerprint,
            layout=layout,
            shard=shard,
            on_event=on_event,
        )
    place = node_place(config)
    revive = None
    if config.store.where == "auto":

        def revive() -> None:
            if not control.listens(place.socket):
                _start_node(config, place)

        revive()
    elif not control.listens(place.socket):
        raise NodeAwayError(
            f"no node listens on {place.socket}; start one with `kvist node`, or set "
            "store.where=auto"
        )
    return NodeStore(
        place.socket,
        Attach(fingerprint, msgspec.json.encode(layout).decode() if layout else "", block_bytes),
        name=Path(sys.argv[0]).name,
        answer_s=config.node.answer_s,
        on_event=on_event,
        revive=revive,
    )


def node_place(config: Config) -> Place:
    """Where the node of this configuration lives."""
    path = config.node.socket
    return Place(Path(path).expanduser().absolute() if path else default_socket())


def node_stores(config: Config) -> OpenStore:
    """What opens the stores of a node: each keyspace has its part of the capacities."""
    parts = config.node.keyspaces

    def open_part(attach: Attach, on_event: Callable[[KvEvent], None]) -> TieredStore:
        return open_embedded_store(
            config if parts == 1 else _part_of(config, parts),
            block_bytes=attach.block_bytes,
            fingerprint=attach.fingerprint,
            layout=_layout_of(attach),
            shard="" if parts == 1 else f"k-{attach.fingerprint.hex()}",
            on_event=on_event,
        )

    return open_part


def _layout_of(attach: Attach) -> BlockLayout | None:
    """What an engine says of its blocks, if it says anything.

    Raises:
        LayoutError: it is no layout, or one of blocks of another size.
    """
    if not attach.layout:
        return None
    try:
        layout = msgspec.json.decode(attach.layout, type=BlockLayout)
    except msgspec.MsgspecError as error:
        raise LayoutError(f"no layout: {error}") from error
    if layout.block_bytes != attach.block_bytes:
        raise LayoutError(f"{layout} is not one of blocks of {attach.block_bytes} bytes")
    return layout


def _part_of(config: Config, parts: int) -> Config:
    replace = msgspec.structs.replace
    store = config.store
    dram = replace(store.dram, capacity=dram_bytes(config) // parts)
    smallest = min(ssd_bytes(config, folder=folder) for folder in ssd_folders(config))
    ssd = replace(store.ssd, capacity=smallest // parts)
    return replace(config, store=replace(store, dram=dram, ssd=ssd))


def _start_node(config: Config, place: Place) -> None:
    """Starts a node in the background with this very configuration, whatever the environment says.

    Raises:
        ConfigError: the socket's folder is not this user's alone.
        NodeAwayError: it did not start.
    """
    place.make_folder()
    place.config.write_text(json.dumps(as_mapping(config)))
    knob_names = {knob.env for knob in knobs().values()}
    env = {name: text for name, text in os.environ.items() if name not in knob_names}
    command = [sys.executable, "-m", "kvist.cli.main", "node", "--detach"]
    options = ["--config", str(place.config), "--socket", str(place.socket)]
    control.start([*command, *options], env, place.log)


def open_embedded_store(
    config: Config,
    *,
    block_bytes: int,
    fingerprint: bytes,
    layout: BlockLayout | None = None,
    shard: str = "",
    on_event: Callable[[KvEvent], None] | None = None,
) -> TieredStore:
    """A store inside this process: a DRAM arena and, if enabled, an SSD tier that this owns.

    Args:
        config: the knobs.
        block_bytes: size of one canonical block.
        fingerprint: the keyspace's fingerprint (32 bytes), written into every frame.
        layout: what a block looks like; codecs other than `raw` and `aead` need it.
        shard: subfolder of the SSD tier, for engines that keep stores of their own.
        on_event: gets every KV event.

    Raises:
        ConfigError: the DRAM tier holds no block, the insert filter does not fit the order, or the
            codec cannot be had: no such one, not for this layout, without keys or its package.
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
    capacity_blocks = capacity_bytes // block_bytes
    policy = _POLICIES[config.store.dram.policy](capacity_blocks)
    insert_filter = _insert_filter(config, policy, capacity_blocks)
    lower: LowerTier | None = None
    if config.store.ssd.enabled:
        lower = _open_ssd(config, fingerprint, shard, _codecs(config, layout))
    knobs = config.store.breaker
    arena = Arena(capacity_bytes, slot_bytes=block_bytes)
    Warmer(arena, lambda: arena.touched_bytes).start()
    return TieredStore(
        arena,
        policy,
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
        ttl_s=config.store.ttl_s or None,
        quota=_quota(config),
        insert_filter=insert_filter,
        restore_blocks=int(config.store.dram.restore * capacity_blocks),
    )


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


def _codecs(config: Config, layout: BlockLayout | None) -> CodecRegistry:
    """What the SSD tier writes and reads. Says so, once, if answers may change.

    Raises:
        ConfigError: the codec cannot be had.
    """
    ssd = config.store.ssd
    keyring = read_keyring(ssd.keys) if ssd.keys else None
    codecs = open_codecs(ssd.codec, layout, keyring)
    if codecs.writer is not None and not codecs.writer.exact:
        _log.warning(
            "store.ssd.codec=%s is LOSSY: blocks that come back from disk are not quite what was "
            "computed, so answers may change; raw and lossless never change them",
            ssd.codec,
        )
    return codecs


def _open_ssd(config: Config, fingerprint: bytes, shard: str, codecs: CodecRegistry) -> LowerTier:
    """One tier, or one for each folder behind a `StripedTier`; a folder that fails is left out.

    Raises:
        TierBusyError: another process owns a folder.
        TierError: no folder can be used.
    """
    folders = ssd_folders(config)
    if len(folders) == 1:
        return _open_folder(config, folders[0], fingerprint, shard, codecs)
    members: list[tuple[str, SsdTier, float]] = []
    failure: TierError | None = None
    with ExitStack() as undo:
        for folder in folders:
            try:
                tier = _open_folder(config, folder, fingerprint, shard, codecs)
            except TierBusyError:
                raise
            except TierError as error:
                _log.warning("SSD folder %s is left out: %s", folder, error)
                failure = error
                continue
            undo.callback(tier.close)
            members.append((str(folder), tier, float(ssd_bytes(config, folder=folder))))
        if failure is not None and not members:
            raise failure
        undo.pop_all()
    return StripedTier(members)


def _open_folder(
    config: Config, folder: Path, fingerprint: bytes, shard: str, codecs: CodecRegistry
) -> SsdTier:
    ssd = config.store.ssd
    return SsdTier.open(
        folder / shard if shard else folder,
        keyspace=fingerprint,
        capacity_bytes=ssd_bytes(config, folder=folder),
        segment_bytes=ssd.segment,
        fsync=_FSYNC[ssd.fsync],
        mode=IoMode(ssd.io),
        engine=EngineKind(ssd.engine),
        depth=ssd.depth,
        codecs=codecs,
    )
