"""`kvist up`: starts nodes and engines on a Ray cluster, and waits until they serve."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvist.cli import screen
from kvist.cli.host_changes import HostChanges
from kvist.config import load_config
from kvist.core.errors import ConfigError
from kvist.launch import ray_cluster
from kvist.launch.spec import ClusterSpec, HostOrders, for_node, read_spec

if TYPE_CHECKING:
    from kvist.launch.ray_actors import ClusterState

_LOOK_S = 1.0
_WAIT_S = 3600.0


def add_parser(subparsers: Any) -> None:
    """Adds `up`."""
    parser = screen.add_command(
        subparsers,
        "up",
        summary="start nodes and engines on a Ray cluster",
        details="Every Ray node gets a node of Kvist and, beside it, the engines that FILE names. "
        "What ends is started again, on another Ray node if its own has gone. Returns when "
        "everything serves; run it again to see how far it is. Ray must run (`ray start --head`); "
        "docs/ray.md shows a FILE.",
        example="kvist up cluster.yaml",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML file of the cluster")
    parser.add_argument("--no-wait", action="store_true", help="return when Ray has the orders")
    parser.add_argument("--status", action="store_true", help="show what runs; start nothing")
    parser.add_argument(
        "--timeout",
        type=float,
        default=_WAIT_S,
        metavar="SECONDS",
        help="how long to wait until everything serves (default: %(default).0f)",
    )
    screen.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Starts the cluster; 1 if it does not serve within the time.

    Raises:
        ConfigError: the file cannot be used, or there is no Ray cluster.
    """
    spec = read_spec(args.file)
    tried = for_node(HostOrders(spec.name, "0", "", spec.kvist, (), address="127.0.0.1"))
    load_config("/dev/null", {}, tried, overrides_origin=str(args.file))
    with ray_cluster.connected(spec.ray, spec.name):
        if not args.status:
            ray_cluster.up(spec)
        try:
            found = _wait(spec, 0.0 if args.status or args.no_wait else args.timeout)
        except KeyboardInterrupt:
            print(
                f"kvist: {spec.name} goes on starting; kvist down {args.file} ends it",
                file=sys.stderr,
            )
            raise
    if args.json:
        screen.print_json({**msgspec.to_builtins(found), "ready": found.ready})
    else:
        _show(found)
    if found.ready or args.status or args.no_wait:
        return 0
    print(f"kvist: {spec.name} does not serve after {args.timeout:.0f} s", file=sys.stderr)
    return 1


def _wait(spec: ClusterSpec, wait_s: float) -> ClusterState:
    """Says what changes until everything serves or the time is over."""
    until, pause = time.monotonic() + wait_s, threading.Event()
    changes = HostChanges()
    while True:
        found = ray_cluster.state()
        if found is None:
            raise ConfigError(f"no cluster {spec.name} runs", path="FILE", remedy="kvist up FILE")
        if found.ready or time.monotonic() >= until:
            return found
        for host in found.hosts:
            changes.say(host)
        pause.wait(_LOOK_S)


def _show(found: ClusterState) -> None:
    grid = screen.table("host", "machine", "what", "phase", "restarts", "where", "says")
    for host in found.hosts:
        for child in host.children:
            where = child.url or (host.socket if child.what == "node" else "")
            grid.add_row(
                *(host.node, host.machine, child.what, child.phase, str(child.restarts), where),
                "" if child.phase == "ready" else child.detail,
            )
    screen.console().print(grid)
    if len(found.hosts) < found.wanted:
        print(f"{found.wanted - len(found.hosts)} of {found.wanted} hosts wait for a Ray node")
