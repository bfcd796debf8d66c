"""`kvist node`: runs the node of this host, shows it, ends it."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvist.cli import screen
from kvist.config import LoadedConfig
from kvist.core.errors import NodeAwayError, NodeRefusedError

if TYPE_CHECKING:
    from kvist.node.estates import Left

_log = logging.getLogger(__name__)
_START_S = 30.0
_LOOK_S = 0.05
_REPLACE_S = 90.0
_SHORT_HEX = 12


def add_parser(subparsers: Any) -> None:
    """Adds `node`."""
    parser = screen.add_command(
        subparsers,
        "node",
        summary="share one store between the engines of this host",
        details="Engines with store.where=node attach to it. It owns DRAM and SSD; blocks that one "
        "engine wrote, all of the same model can read. It ends on SIGTERM, when it has written "
        "what is not on SSD yet.",
        example="kvist node --set store.dram.capacity=16GiB\n  kvist node status",
    )
    parser.add_argument(
        "action",
        nargs="?",
        choices=("run", "status", "stop", "drain"),
        default="run",
        help="run it here, show the one that runs, end it, or end it when the other nodes of its "
        "cluster have what only it holds",
    )
    parser.add_argument("--socket", metavar="PATH", help="the same as --set node.socket=PATH")
    parser.add_argument("--detach", action="store_true", help="return when it listens; it stays")
    parser.add_argument(
        "--replace",
        action="store_true",
        help="end the node that runs, and adopt what it has in DRAM and on SSD",
    )
    screen.add_config_options(parser)
    screen.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Runs, shows or ends a node.

    Raises:
        ConfigError: the configuration cannot be used.
        NodeAwayError: none runs, or it could not be started.
        NodeRunningError: one runs already.
    """
    if args.socket:
        args.set = [*args.set, f"node.socket={args.socket}"]
    loaded = screen.config_from(args)
    if args.action == "status":
        return _status(loaded, as_json=args.json)
    if args.action == "stop":
        return _end(loaded, "drain", loaded.config.node.drain_s)
    if args.action == "drain":
        node = loaded.config.node
        return _end(loaded, "hand-over", node.cluster.drain_s + node.drain_s)
    if args.detach:
        return _detach(args, loaded)
    return _run(loaded, replace=args.replace)


def _run(loaded: LoadedConfig, *, replace: bool) -> int:
    from kvist.assemble import node_cluster, node_front, node_peering, node_place, node_stores
    from kvist.node.daemon import serve
    from kvist.node.estates import Estates

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config, place = loaded.config, node_place(loaded.config)
    peering = node_peering(config)
    join = node_cluster(config, place, peering)
    estates = Estates(_left(place.socket)) if replace else None
    gc.collect()
    gc.freeze()  # what a process is made of is never garbage: nobody need look at it again
    serve(
        place,
        partial(node_stores, config, estates=estates),
        keyspaces=config.node.keyspaces,
        drain_s=config.node.drain_s,
        wait_s=_REPLACE_S if replace else 0.0,
        peering=peering,
        join=join,
        hand_over_s=config.node.cluster.drain_s,
        last_s=config.node.cluster.drain_on_stop_s,
        open_front=lambda: node_front(config, place),
        estates=estates,
    )
    return 0


def _left(socket: Path) -> list[Left]:
    """Ends the node that runs; what it leaves in DRAM."""
    from kvist.node import control
    from kvist.node.handover import inherit

    try:
        return inherit(socket, deadline_s=_REPLACE_S)
    except NodeRefusedError:  # of an older Kvist: it leaves what is on SSD
        with contextlib.suppress(NodeAwayError):
            control.ask(socket, "drain")
    except NodeAwayError:
        _log.info("no node has to be replaced")
    return []


def _detach(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    """Runs the same command without `--detach`, away from this terminal and on every core."""
    from kvist.assemble import node_place
    from kvist.node import control

    place = node_place(loaded.config)
    place.make_folder()
    options = [f"--set={text}" for text in args.set]
    options += [f"--config={args.config}"] if args.config else []
    options += ["--replace"] if args.replace else []
    with contextlib.suppress(OSError):  # an engine that starts us may be bound to one core
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with place.log.open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "kvist.cli.main", "node", *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    until = time.monotonic() + (_REPLACE_S if args.replace else _START_S)
    while time.monotonic() < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_LOOK_S)
        if _answers(place.socket, child):
            print(f"kvist: a node serves {place.socket}")
            return 0
        if child.returncode is not None:
            break
    if child.returncode is not None and control.listens(place.socket):
        print(f"kvist: a node serves {place.socket} already")  # someone else was first
        return 0
    raise NodeAwayError(f"the node did not start: {_last_line(place.log)}")


def _answers(socket: Path, child: subprocess.Popen[bytes]) -> bool:
    from kvist.node import control

    try:
        return bool(control.ask(socket, "status")["pid"] == child.pid)
    except (NodeAwayError, NodeRefusedError):
        return False


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("kvist: error: ") if lines else f"nothing in {log}"


def _end(loaded: LoadedConfig, how: str, within_s: float) -> int:
    from kvist.assemble import node_place
    from kvist.node import control
    from kvist.node.place import NodeLock

    place = node_place(loaded.config)
    control.ask(place.socket, how)
    NodeLock(place, wait_s=within_s + _START_S).release()
    print("kvist: the node has ended")
    return 0


def _status(loaded: LoadedConfig, *, as_json: bool) -> int:
    from kvist.assemble import node_place
    from kvist.node import control

    found = control.ask(node_place(loaded.config).socket, "status")
    if as_json:
        screen.print_json(found)
        return 0
    print(
        f"process {found['pid']} serves {found['socket']} for {found['uptime_s']:.0f} s, "
        f"{found['clients']} clients"
    )
    if "cluster" in found:
        cluster = found["cluster"]
        others = [f"{name} ({state})" for name, state in sorted(cluster["nodes"].items())]
        known = cluster["samples"]["kvist_directory_blocks"]
        print(
            f"node {cluster['node']} of a cluster is {cluster['state']}; others: "
            f"{', '.join(others) or 'none'}; {known:,.0f} blocks are known to be there"
        )
    names = ("keyspace", "engines", "blocks", "free", "bytes", "leases", "dirty")
    grid = screen.table(*names, right=frozenset(names[1:]))
    for keyspace in found["keyspaces"]:
        grid.add_row(
            keyspace["fingerprint"][:_SHORT_HEX],
            str(keyspace["sessions"]),
            f"{keyspace['dram_blocks']:,}",
            f"{keyspace['free_blocks']:,}",
            screen.format_bytes(keyspace["dram_bytes"]),
            str(keyspace["leases"]),
            f"{keyspace['dirty_blocks']:,}",
        )
    screen.console().print(grid)
    return 0
