"""A scenario in a YAML file: a cluster, a trace or synthetic traffic, and a seed.

The sections are the dataclasses of `spec`, so a key is a field of theirs. Faults of the file are
one line that names file, JSON path and remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kvist.core.errors import ConfigError
from kvist.cost.catalogue import model as catalogue_model
from kvist.cost.device import Hardware, device
from kvist.cost.model import ModelShape, shape_from_config
from kvist.sim.des.cluster import simulate
from kvist.sim.des.report import Report
from kvist.sim.des.routing_spec import AdmissionKind, RouterKind, RoutingSpec
from kvist.sim.des.spec import (
    ArrivalSpec,
    ClusterSpec,
    EngineSpec,
    Fault,
    LinkSpec,
    RandomFaults,
    Role,
    Slo,
    StoreSpec,
)
from kvist.sim.formats import read_trace
from kvist.sim.synthetic import synthetic
from kvist.sim.traces import Trace

KINDS = ("chat", "rag", "agent", "oneshot")
_MAX_FILE_BYTES = 1 << 20
_MAX_NODES = 1024


@dataclass(frozen=True, slots=True)
class HardwareSource:
    """A device of the catalogue; `count` of them hold one replica."""

    device: str
    count: int = 8
    time_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """How many nodes of each role."""

    mixed: int = 0
    prefill: int = 0
    decode: int = 0

    def __post_init__(self) -> None:
        for name in ("mixed", "prefill", "decode"):
            if getattr(self, name) < 0:
                raise ConfigError("must be 0 or more", path=f"$.nodes.{name}")
        if not 0 < self.mixed + self.prefill + self.decode <= _MAX_NODES:
            raise ConfigError(f"must be 1 to {_MAX_NODES} in all", path="$.nodes")

    def roles(self) -> tuple[Role, ...]:
        """One role a node."""
        prefill = (Role.PREFILL,) * self.prefill
        return prefill + (Role.DECODE,) * self.decode + (Role.MIXED,) * self.mixed


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A trace's `path` (from the scenario's folder), or `synthetic` traffic of a kind."""

    path: str | None = None
    synthetic: str | None = None
    requests: int = 1000
    rate_per_s: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.path is None) == (self.synthetic is None):
            raise ConfigError(
                "names no traffic, or two", path="$.trace", remedy="give either path or synthetic"
            )
        if self.synthetic is not None and self.synthetic not in KINDS:
            raise ConfigError(
                f"unknown kind {self.synthetic!r}",
                path="$.trace.synthetic",
                remedy=f"take {', '.join(KINDS)}",
            )
        if self.requests < 1:
            raise ConfigError("must be at least 1", path="$.trace.requests")
        if not 0 < self.rate_per_s < float("inf"):
            raise ConfigError("must be above 0", path="$.trace.rate_per_s")


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a YAML file says. `folder` is where it lies: paths in it start there."""

    model: str
    hardware: HardwareSource
    trace: TraceSource
    nodes: int | NodeCounts = 1
    engine: EngineSpec = field(default_factory=EngineSpec)
    store: StoreSpec = field(default_factory=StoreSpec)
    links: LinkSpec = field(default_factory=LinkSpec)
    router: RouterKind = RouterKind.LEAST_LOADED
    admission: AdmissionKind = AdmissionKind.NONE
    routing: RoutingSpec = field(default_factory=RoutingSpec)
    slo: Slo = field(default_factory=Slo)
    arrivals: ArrivalSpec = field(default_factory=ArrivalSpec)
    faults: tuple[Fault, ...] = ()
    random_faults: RandomFaults = field(default_factory=RandomFaults)
    seed: int = 0
    folder: Path = Path()

    def cluster(self) -> ClusterSpec:
        """The cluster that it describes.

        Raises:
            ConfigError: an unknown model or device, or nodes that cannot serve.
        """
        counts = NodeCounts(mixed=self.nodes) if isinstance(self.nodes, int) else self.nodes
        chips = self.hardware
        return ClusterSpec(
            model=self._model(),
            hardware=Hardware(device(chips.device), chips.count, chips.time_scale),
            roles=counts.roles(),
            engine=self.engine,
            store=self.store,
            links=self.links,
            router=self.router,
            admission=self.admission,
            routing=self.routing,
            slo=self.slo,
            arrivals=self.arrivals,
            faults=self.faults,
            random_faults=self.random_faults,
        )

    def read_trace(self, progress: Callable[[int], None] | None = None) -> Trace:
        """The traffic that it names.

        Raises:
            FormatError: the trace cannot be read; names file, line and field.
            OSError: likewise.
        """
        source = self.trace
        if source.synthetic is not None:
            return synthetic(source.synthetic, source.requests, source.rate_per_s, source.seed)
        return read_trace(self.folder / str(source.path), progress)

    def run(self, progress: Callable[[int], None] | None = None) -> Report:
        """Reads the trace and plays it; `progress` gets the number of requests that ended.

        Raises:
            ConfigError, FormatError, OSError: see `cluster` and `read_trace`.
        """
        return simulate(self.cluster(), self.read_trace(), seed=self.seed, progress=progress)

    def _model(self) -> ModelShape:
        if not self.model.endswith(".json"):
            return catalogue_model(self.model)
        path = self.folder / self.model
        try:
            return shape_from_config(json.loads(path.read_bytes()), name=path.parent.name)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path} is not JSON: {error}", path="$.model") from error


def load_scenario(path: Path, changes: Mapping[str, object] | None = None) -> Scenario:
    """Reads a scenario; `changes` sets keys by dotted path, such as `engine.step_tokens`.

    Raises:
        ConfigError: it cannot be used; names file, JSON path and remedy.
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        raw = stream.read(_MAX_FILE_BYTES + 1)
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError("is above 1 MiB", origin=str(path), remedy="is it the right file?")
    try:
        tree = yaml.safe_load(raw.decode())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        fault = " ".join(str(error).split())
        raise ConfigError(f"is not YAML: {fault}", origin=str(path)) from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"holds a {type(tree).__name__}, not a mapping",
            origin=str(path),
            remedy='begin with a line such as "model: llama-3-70b"',
        )
    for dotted, value in (changes or {}).items():
        _set(tree, dotted, value)
    try:
        _refuse_unknown(tree, Scenario, "$")
        return dataclasses.replace(msgspec.convert(tree, Scenario), folder=path.parent)
    except msgspec.ValidationError as error:
        raise _located(error, str(path)) from error
    except ConfigError as error:
        raise _with_origin(error, str(path)) from error


def _set(tree: dict[str, Any], dotted: str, value: object) -> None:
    *sections, name = dotted.split(".")
    for section in sections:
        below = tree.setdefault(section, {})
        if not isinstance(below, dict):
            raise ConfigError("is no section", path=f"$.{dotted}")
        tree = below
    tree[name] = value


def _refuse_unknown(tree: object, kind: Any, path: str) -> None:
    """Every key must be a field: msgspec passes over the unknown ones of a dataclass."""
    if isinstance(tree, list):
        for number, item in enumerate(tree):
            for inner in typing.get_args(kind):
                _refuse_unknown(item, inner, f"{path}[{number}]")
        return
    if isinstance(kind, types.UnionType):
        kind = next((k for k in kind.__args__ if dataclasses.is_dataclass(k)), kind)
    if not isinstance(tree, dict) or not dataclasses.is_dataclass(kind):
        return
    hints = typing.get_type_hints(kind)
    hints.pop("folder", None)
    for name, value in tree.items():
        if name not in hints:
            near = difflib.get_close_matches(str(name), hints, n=1, cutoff=0.6)
            remedy = f"did you mean {near[0]}?" if near else f"known: {', '.join(hints)}"
            raise ConfigError("no such key", path=f"{path}.{name}", remedy=remedy)
        _refuse_unknown(value, hints[name], f"{path}.{name}")


def _located(error: msgspec.ValidationError, origin: str) -> ConfigError:
    """msgspec's error, or the one of a dataclass that it carries, with its file."""
    cause = error.__cause__
    message, _, where = str(error).partition(" - at `")
    place = where.rstrip("`")
    if isinstance(cause, ConfigError):
        inner = cause.path.rsplit(".", 1)[-1]
        path = place if place.endswith(inner) else f"{place or '$'}.{inner}"
        text = cause.args[0].removeprefix(f"{cause.path}: ")
        return ConfigError(text, path=path, origin=origin)
    remedy = "see docs/sim.md for what each key takes"
    return ConfigError(message[:1].lower() + message[1:], path=place or "$", origin=origin,
                       remedy=remedy)  # fmt: skip


def _with_origin(error: ConfigError, origin: str) -> ConfigError:
    text = error.args[0].removeprefix(f"{error.path}: ")
    return ConfigError(text, path=error.path, origin=origin)
