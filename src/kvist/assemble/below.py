"""What stands below DRAM: the SSD tier, a remote, or the one above the other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from kvist.adapters.opening import Limits, open_layered
from kvist.codec.registry import CodecRegistry
from kvist.codec.setting import CodecSetting
from kvist.config import Config, remote_codec, ssd_bytes, ssd_codec, ssd_folders
from kvist.core.errors import TierBusyError, TierError
from kvist.core.layout import BlockLayout
from kvist.core.outcome import Tier
from kvist.tiers.borrowing import BorrowingTier, Keeper, Lender
from kvist.tiers.protocol import LowerTier
from kvist.tiers.remote import LearnLimits, RemoteTier
from kvist.tiers.ssd import EngineKind, FsyncMode, IoMode, SsdTier
from kvist.tiers.ssd.striped import StripedTier
from kvist.tiers.stacked import StackedTier

_log = logging.getLogger(__name__)
_FSYNC = {"batch": FsyncMode.BATCH, "off": FsyncMode.OFF}


def _codecs(setting: CodecSetting, layout: BlockLayout | None) -> CodecRegistry:
    """What a tier writes and reads. Says so, once, if answers may change.

    Raises:
        ConfigError: the codec cannot be had.
    """
    codecs = setting.open(layout)
    if codecs.writer is not None and not codecs.writer.exact:
        _log.warning(
            "%s.codec=%s is LOSSY: blocks that come back from there are not quite what was "
            "computed, so answers may change; raw and lossless never change them",
            setting.section,
            setting.codec,
        )
    return codecs


def open_below(
    config: Config,
    fingerprint: bytes,
    shard: str,
    layout: BlockLayout | None,
    lender: Callable[[], Lender | None] | None = None,
) -> tuple[LowerTier | None, Tier]:
    """What stands below DRAM, and what it is called where nothing tells its media apart.

    Raises:
        ConfigError: the remote or the codec is none that we know.
        TierBusyError: another process owns a folder of the SSD tier.
        TierError: a medium cannot be used.
    """
    own = _open_own(config, fingerprint, shard, layout)
    name = Tier.SSD if config.store.ssd.enabled else Tier.REMOTE
    others = lender() if lender is not None else None
    if others is None:
        return own, name
    return BorrowingTier(own, others, own_name=name), name if own is not None else Tier.PEER


def _open_own(
    config: Config, fingerprint: bytes, shard: str, layout: BlockLayout | None
) -> Keeper | None:
    """The SSD tier, the remote tier, the one above the other, or nothing.

    Raises:
        ConfigError: the remote or the codec is none that we know.
        TierBusyError: another process owns a folder of the SSD tier.
        TierError: a medium cannot be used.
    """
    knobs = config.store.remote
    with ExitStack() as undo:
        disk: SsdTier | StripedTier | None = None
        if config.store.ssd.enabled:
            disk = _open_ssd(config, fingerprint, shard, _codecs(ssd_codec(config), layout))
        if not knobs.url:
            return disk
        if disk is not None:
            undo.callback(disk.close)
        remote = _open_remote(config, fingerprint, _codecs(remote_codec(config), layout))
        undo.pop_all()
    return remote if disk is None else StackedTier(disk, remote, queue_bytes=knobs.queue)


def _open_remote(config: Config, fingerprint: bytes, codecs: CodecRegistry) -> RemoteTier:
    knobs, breaker = config.store.remote, config.store.breaker
    opened = open_layered(
        knobs.url,
        Limits(
            capacity_bytes=knobs.capacity or None,
            connections=knobs.connections,
            timeout_s=knobs.timeout_s,
            retries=knobs.retries,
            bytes_per_s=knobs.bandwidth,
            failures=breaker.failures,
            window_s=breaker.window_s,
            open_s=breaker.open_s,
        ),
    )
    return RemoteTier(
        opened.adapter,
        keyspace=fingerprint,
        connections=knobs.connections,
        limits=LearnLimits(
            most_blocks=knobs.index, probe_s=knobs.probe_s, refresh_s=knobs.refresh_s
        ),
        codecs=codecs,
        available=opened.breaker.passes,
        counts=opened.counts.counts,
    )


def _open_ssd(
    config: Config, fingerprint: bytes, shard: str, codecs: CodecRegistry
) -> SsdTier | StripedTier:
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
