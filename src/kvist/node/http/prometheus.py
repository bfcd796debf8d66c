"""A node's status as a page for Prometheus; what is of every keyspace is summed up.

A sample of the status is a metric's name, and the value of its label after a dot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    samples = _summed(keyspaces) | status.get("cluster", {}).get("samples", {})
    described = set[str]()
    for sample, value in sorted(samples.items()):
        name, dot, label = sample.partition(".")
        labels = f'{{{BY_NAME[name].labels[0]}="{label}"}}' if dot else ""
        yield _shown(name, labels, value, described=name not in described)
        described.add(name)


def _summed(keyspaces: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What stores say of peers, a remote and what else is below DRAM; a state is the worst one."""
    found: dict[str, float] = {}
    for keyspace in keyspaces:
        samples = dict(keyspace["samples"])
        breakers = keyspace["lower_read"], keyspace["lower_write"]
        if any(breakers):
            samples["kvist_breaker_open.below-dram"] = float("open" in breakers)
        for sample, value in samples.items():
            is_state = BY_NAME[sample.partition(".")[0]].unit == "boolean"
            before = found.get(sample, 0.0)
            found[sample] = max(before, value) if is_state else before + value
    return found


def _shown(name: str, labels: str, value: float, *, described: bool = True) -> str:
    metric = BY_NAME[name]
    about = f"# HELP {name} {metric.description}\n# TYPE {name} {metric.kind.value}\n"
    return f"{about if described else ''}{name}{labels} {value}\n"
