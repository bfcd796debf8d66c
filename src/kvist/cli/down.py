"""`kvist down`: ends what `kvist up` started."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvist.cli import screen
from kvist.core.errors import ConfigError
from kvist.launch import ray_cluster
from kvist.launch.spec import ClusterSpec, read_spec


def add_parser(subparsers: Any) -> None:
    """Adds `down`."""
    parser = screen.add_command(
        subparsers,
        "down",
        summary="end what `kvist up` started",
        details="Engines end first; then every node writes what is not on SSD yet and ends. "
        "Ray itself, the SSD caches, and logs (kvist/NAME-NODE in the runtime folder) stay.",
        example="kvist down cluster.yaml",
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="the cluster's file")
    parser.add_argument("--name", help="name of the cluster, in place of FILE")
    parser.add_argument("--ray", default="auto", help="address of Ray, beside --name")
    screen.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Ends a cluster; 1 where none runs.

    Raises:
        ConfigError: neither FILE nor name, or there is no Ray cluster.
    """
    if (args.file is None) == (args.name is None):
        raise ConfigError("say which cluster", path="FILE", remedy="give a FILE, or --name NAME")
    spec = read_spec(args.file) if args.file else ClusterSpec(name=args.name, ray=args.ray)
    with ray_cluster.connected(spec.ray, spec.name):
        ended = ray_cluster.down()
    if args.json:
        screen.print_json({"name": spec.name, "ended": ended})
    else:
        logs = f"logs are in kvist/{spec.name}-NODE of each host's runtime folder"
        print(f"kvist: {spec.name} {f'has ended; {logs}' if ended else 'does not run'}")
    return 0 if ended else 1
