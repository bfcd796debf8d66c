"""The index of a gateway's router, and what fills it, from the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvist.assemble.cluster import event_secret, nodes_discovery
from kvist.assemble.replicas import Entry
from kvist.cluster.directory import Limits
from kvist.config import Config, RouterConfig
from kvist.core.errors import ConfigError
from kvist.cost.model import shape_from_config
from kvist.cost.transfer import LoadOverhead, PathSpeed, TransferTimes
from kvist.gateway.hearing import Everybody, Hearing
from kvist.router.index import Lives, PrefixIndex
from kvist.router.prefixes import IndexedPrefixes
from kvist.router.serving import Loading
from kvist.router.turns import Turns

_SSD_LATENCY_S, _PEER_LATENCY_S = 1e-3, 2e-3


def prefixes_of(
    config: Config, fingerprint: bytes, entries: Sequence[Entry] = ()
) -> IndexedPrefixes:
    """What a router knows of prefixes: what it sent where, and what it hears.

    Args:
        fingerprint: of the keyspace that prompts are named in, 32 bytes.
        entries: the replicas that are known beforehand.
    """
    events, lock = config.gateway.events, Turns()
    index = PrefixIndex(
        block_tokens=config.block_tokens,
        fingerprint=fingerprint,
        limits=Limits(most_keys=events.index),
        lives=Lives(events.heard_s, events.silent_s),
        by_name=True,
        pause=lock.pause,
    )
    engines = {entry.url: entry.home.engine for entry in entries}
    return IndexedPrefixes(index, engines=engines, lock=lock)


def hearing_of(
    config: Config, prefixes: IndexedPrefixes, entries: Sequence[Entry]
) -> Hearing | None:
    """What hears engines and nodes; None where nobody is to be heard.

    Raises:
        ConfigError: the discovery of nodes, or their secret, cannot be used.
        TierError: its medium failed.
    """
    if not config.gateway.events.enabled:
        return None
    nodes = nodes_discovery(config)
    heard = [entry.record for entry in entries if entry.events]
    if not heard and nodes is None:
        return None
    homes = {entry.url: entry.home for entry in entries}
    keyspace = config.gateway.events.keyspace
    return Hearing(
        prefixes, homes, Everybody(heard, nodes), event_secret(config), keyspace=keyspace
    )


def loading_of(config: RouterConfig, block_tokens: int, folder: Path | None) -> Loading | None:
    """How KV comes to a replica from below HBM; None where its size is not known.

    Args:
        folder: of the model.
    """
    token_bytes = config.kv_token_bytes or (_token_bytes(folder) if folder is not None else 0)
    if not token_bytes:
        return None
    overhead = LoadOverhead()
    times = TransferTimes(
        {
            "dram": PathSpeed(0.0, config.dram_bytes_per_s),
            "ssd": PathSpeed(_SSD_LATENCY_S, config.ssd_bytes_per_s),
            "remote": PathSpeed(_PEER_LATENCY_S, config.peer_bytes_per_s),
        }
    )
    return Loading(times, token_bytes, block_tokens, overhead.per_load_s, overhead.per_block_s)


def _token_bytes(folder: Path) -> int:
    try:
        found = msgspec.json.decode((folder / "config.json").read_bytes())
        return shape_from_config(found).token_bytes
    except (OSError, msgspec.MsgspecError, ConfigError):
        return 0
