"""A node's status as a page for Prometheus; what is of every keyspace is summed up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvist.metrics import BY_NAME

_DRAM = '{tier="dram"}'
_OF_NODE: dict[str, str] = {
    "kvist_node_clients": "clients",
    "kvist_node_uptime_seconds": "uptime_s",
}
_Sample = tuple[str, str, Callable[[Mapping[str, Any]], float]]
_OF_KEYSPACES: tuple[_Sample, ...] = (
    ("kvist_tier_blocks", _DRAM, lambda k: k["dram_blocks"]),
    ("kvist_tier_bytes", _DRAM, lambda k: k["dram_bytes"]),
    ("kvist_tier_capacity_bytes", _DRAM, lambda k: k["capacity_blocks"] * k["block_bytes"]),
    ("kvist_evictions_total", _DRAM, lambda k: k["evicted"]),
    ("kvist_no_space_total", "", lambda k: k["no_space"]),
    ("kvist_node_leases", "", lambda k: k["leases"]),
    ("kvist_node_pinned_blocks", "", lambda k: k["pinned_blocks"]),
    ("kvist_node_dirty_blocks", "", lambda k: k["dirty_blocks"]),
)


def page(status: Mapping[str, Any]) -> str:
    """The text of the page, from what the node says to `status`."""
    return "".join(_lines(status))


def _lines(status: Mapping[str, Any]) -> Iterator[str]:
    keyspaces = status["keyspaces"]
    for name, field in _OF_NODE.items():
        yield _shown(name, "", status[field])
    yield _shown("kvist_node_keyspaces", "", len(keyspaces))
    for name, labels, value in _OF_KEYSPACES:
        yield _shown(name, labels, sum(value(keyspace) for keyspace in keyspaces))


def _shown(name: str, labels: str, value: float) -> str:
    metric = BY_NAME[name]
    return (
        f"# HELP {name} {metric.description}\n# TYPE {name} {metric.kind.value}\n"
        f"{name}{labels} {value}\n"
    )
