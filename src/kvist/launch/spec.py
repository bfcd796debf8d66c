"""What `kvist up` reads: which engines, on how many hosts, with which configuration of Kvist."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta, Struct

from kvist.core.errors import ConfigError

_MOST_FILE_BYTES = 1 << 20
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
NODE_WORD, ADDRESS_WORD = "{node}", "{address}"
LOOPBACK = "127.0.0.1:0"


class EngineSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A vLLM server of which every host runs `per_host`."""

    model: str
    per_host: Annotated[int, Meta(ge=1, le=64)] = 1
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Meta(ge=1, le=65_000)] = 8000
    """The first port that is tried; the next free one is taken."""
    gpus: Annotated[int, Meta(ge=0, le=64)] = 0
    args: tuple[str, ...] = ()
    """Options of vLLM."""
    env: dict[str, str] = {}


class ClusterSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A whole cluster."""

    name: str = "kvist"
    ray: str = "auto"
    """Address of the Ray cluster."""
    hosts: Annotated[int, Meta(ge=1)] | Literal["all"] = "all"
    """Ray nodes to use."""
    cpus: Annotated[float, Meta(ge=0)] = 0
    """CPUs that Ray sets aside on each of them."""
    kvist: dict[str, Any] = {}
    """Configuration of the nodes and the engines. In a text, `{node}` is the Ray node's id and
    `{address}` its host's."""
    engines: tuple[EngineSpec, ...] = ()

    @property
    def gpus(self) -> int:
        """GPUs that a host needs."""
        return sum(engine.gpus * engine.per_host for engine in self.engines)


class FrontSpec(Struct, frozen=True):
    """A gateway before the engines of one host, whose ports then stay what they are."""

    listen: str
    """Address and port."""
    scheme: str = "http"
    """`https` where the configuration has a certificate."""
    prefills: int = 0
    """How many of the engines, from the first, only compute prompts for the others."""
    drain_s: float = 300.0
    """Seconds that its requests may take to end when it is told to."""


class HostOrders(Struct, frozen=True):
    """What one host has to run."""

    name: str
    node: str
    """Short id of the host."""
    folder: str
    """Where its socket, its configuration and its logs stand; empty: in the user's runtime one."""
    kvist: dict[str, Any]
    engines: tuple[EngineSpec, ...]
    gpu_ids: tuple[str, ...] = ()
    address: str = ""
    """By which others reach the host."""
    discovery: str = ""
    """HOST:PORT/NAME by which the nodes find each other; empty: they are in no cluster."""
    front: FrontSpec | None = None
    """None: the engines are reached one by one."""


class ChildReport(Struct, frozen=True):
    """One process of a host."""

    what: str
    """`node`, `gateway`, or the engine's model."""
    phase: str
    restarts: int = 0
    pid: int = 0
    url: str = ""
    detail: str = ""
    """The last line it said, or why it ended."""


class HostReport(Struct, frozen=True):
    """Everything that runs on one host."""

    node: str
    machine: str
    socket: str
    children: tuple[ChildReport, ...] = ()

    @property
    def ready(self) -> bool:
        """Whether every process serves."""
        return bool(self.children) and all(child.phase == "ready" for child in self.children)


def read_spec(path: Path) -> ClusterSpec:
    """The cluster that a YAML file describes.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or says what is not understood.
    """
    try:
        raw = path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror or error}",
            path=str(path),
            remedy="give the path of a cluster's YAML file; docs/ray.md has one",
        ) from error
    if len(raw) > _MOST_FILE_BYTES:
        raise ConfigError("is above 1 MiB", path=str(path), remedy="is it the right file?")
    try:
        tree = yaml.safe_load(raw.decode())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        fault = " ".join(str(error).split())
        raise ConfigError(f"is not YAML: {fault}", path=str(path), remedy="see docs/ray.md") from (
            error
        )
    try:
        spec = msgspec.convert(tree or {}, ClusterSpec)
    except msgspec.ValidationError as error:
        fault, _, where = str(error).partition(" - at ")
        raise ConfigError(
            f"{fault[:1].lower()}{fault[1:]}",
            path=where.strip("`") or "$",
            origin=str(path),
            remedy="see docs/ray.md",
        ) from error
    if not _NAME.fullmatch(spec.name):
        raise ConfigError(
            f"cannot be {spec.name!r}",
            path="$.name",
            origin=str(path),
            remedy="use at most 32 lower-case letters, digits and hyphens",
        )
    return spec


def is_secret(tree: Mapping[str, Any]) -> bool:
    """Whether a configuration gives its nodes a secret: only then do they trust other hosts."""
    node = tree.get("node", {})
    files = (node.get("peers", {}).get("token_file"), node.get("cluster", {}).get("secret_file"))
    return any(files)


def heard_by_gateway(tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A configuration whose node tells the gateway of the same host what it holds.

    What it says itself of peers and cluster stands.

    Args:
        folder: of the host's own, where the node leaves word of itself.
    """
    node = tree.get("node", {})
    peers, cluster = node.get("peers", {}), node.get("cluster", {})
    if cluster.get("discovery", "none") != "none" or peers.get("members"):
        return dict(tree)
    found = {**cluster, "discovery": "files", "folder": os.fspath(folder), "replicas": 1}
    return {**tree, "node": {**node, "cluster": found}}


def for_node(orders: HostOrders) -> dict[str, Any]:
    """The configuration of one host: words replaced, and its place in the cluster of nodes.

    What it says itself of peers and cluster stands.
    """
    words = {NODE_WORD: orders.node, ADDRESS_WORD: orders.address}

    def filled(value: Any) -> Any:
        if isinstance(value, str):
            for word, text in words.items():
                value = value.replace(word, text)
            return value
        if isinstance(value, Mapping):
            return {key: filled(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [filled(inner) for inner in value]
        return value

    tree: dict[str, Any] = {key: filled(value) for key, value in orders.kvist.items()}
    node = tree.get("node", {})
    peers, cluster = node.get("peers", {}), node.get("cluster", {})
    if not orders.discovery or "discovery" in cluster or "members" in peers:
        return tree
    found = {"discovery": "ray", "url": orders.discovery, "name": orders.node}
    joined = {"peers": {"listen": LOOPBACK, **peers}, "cluster": {**found, **cluster}}
    return {**tree, "node": {**node, **joined}}
