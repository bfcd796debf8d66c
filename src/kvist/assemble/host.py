"""The store that an engine is given: its own, or the node's of this host."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from kvist.assemble.embedded import open_embedded_store
from kvist.config import Config, as_mapping, dram_bytes, knobs, ssd_bytes, ssd_folders
from kvist.core.errors import KvistError, LayoutError, NodeAwayError
from kvist.core.events import KvEvent
from kvist.core.layout import BlockLayout
from kvist.node import control
from kvist.node.client import NodeStore
from kvist.node.estates import Estates, Left
from kvist.node.keyspaces import Attach, OpenStore
from kvist.node.place import Place, default_socket
from kvist.store.tiered import TieredStore
from kvist.tiers.borrowing import Lender
from kvist.tiers.dram import padded


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


def node_stores(
    config: Config,
    lender: Callable[[Attach], Lender | None] | None = None,
    *,
    estates: Estates | None = None,
) -> OpenStore:
    """What opens the stores of a node: each keyspace has its part of the capacities.

    Args:
        config: the node's.
        lender: opens what other nodes have of a keyspace.
        estates: what the node before this one left.
    """
    parts = config.node.keyspaces
    part = config if parts == 1 else _part_of(config, parts)

    def open_part(attach: Attach, on_event: Callable[[KvEvent], None]) -> TieredStore:
        legacy = None
        if estates is not None:
            legacy = estates.claim(
                attach, slot_bytes=padded(attach.block_bytes), most_bytes=dram_bytes(part)
            )
        try:
            return open_embedded_store(
                part,
                block_bytes=attach.block_bytes,
                fingerprint=attach.fingerprint,
                layout=_layout_of(attach),
                shard="" if parts == 1 else f"k-{attach.fingerprint.hex()}",
                on_event=on_event,
                lender=partial(lender, attach) if lender is not None else None,
                legacy=legacy,
            )
        except (KvistError, OSError):
            if legacy is not None and estates is not None:
                estates.put_back(Left(attach, legacy))
            raise

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
    work = place.config.with_name(f"{place.config.name}.{os.getpid()}-{threading.get_ident()}")
    work.write_text(json.dumps(as_mapping(config)))
    work.replace(place.config)  # others may be starting one at this moment
    knob_names = {knob.env for knob in knobs().values()}
    env = {name: text for name, text in os.environ.items() if name not in knob_names}
    command = [sys.executable, "-m", "kvist.cli.main", "node", "--detach"]
    options = ["--config", str(place.config), "--socket", str(place.socket)]
    control.start([*command, *options], env, place.log)
