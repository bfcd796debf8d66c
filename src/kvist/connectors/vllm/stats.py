"""Kvist's counters on vLLM's own channels: its log line and its `/metrics` page.

A sample is named by its metric, with the label's value after a dot:
`kvist_tokens_loaded_total.ssd`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvist.metrics import METRICS, Kind

_KINDS = {metric.name: metric.kind for metric in METRICS}


class Tally:
    """Samples since the last step. Counters add up, gauges keep their last value."""

    def __init__(self) -> None:
        self._samples: dict[str, float] = {}

    def add(self, name: str, amount: float) -> None:
        """Adds one sample.

        Raises:
            KeyError: no such metric in `kvist.metrics`.
        """
        if amount or _kind(name) is Kind.GAUGE:
            _merge(self._samples, name, amount)

    def take(self) -> dict[str, float]:
        """Samples since the last call."""
        samples, self._samples = self._samples, {}
        return samples


class Totals:
    """Turns totals that somebody else keeps into what has been added since the last look."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def since(self, samples: Mapping[str, float]) -> dict[str, float]:
        """Increments of counters; gauges as they are."""
        grown = {
            name: amount if _kind(name) is Kind.GAUGE else amount - self._seen.get(name, 0.0)
            for name, amount in samples.items()
        }
        self._seen = dict(samples)
        return grown


def _kind(name: str) -> Kind:
    return _KINDS[name.partition(".")[0]]


def _merge(samples: dict[str, float], name: str, amount: float) -> None:
    gauge = _kind(name) is Kind.GAUGE
    samples[name] = amount if gauge else samples.get(name, 0) + amount


@dataclass
class KvistStats(KVConnectorStats):
    """vLLM's container; `data` maps sample names to values."""

    def reset(self) -> None:
        """Forgets every sample."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Merges a later container into this one."""
        for name, amount in other.data.items():
            _merge(self.data, name, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The line that vLLM logs."""
        d = self.data
        line: dict[str, int | float] = {}
        for name, amount in d.items():
            metric, _, label = name.partition(".")
            short = metric.removeprefix("kvist_").removesuffix("_total")
            if _kind(name) is Kind.COUNTER and not short.startswith(("bytes_", "copy_")):
                line[f"{short}({label})" if label else short] = int(amount)
        seconds = d.get("kvist_copy_seconds_total", 0)
        if seconds:
            copied = d.get("kvist_bytes_copied_total", 0)
            line["copy GB/s"] = round(copied / seconds / 1e9, 2)
        return line

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not self.data


class KvistPromMetrics(KVConnectorPromMetrics):
    """Registers every metric of `kvist.metrics` with vLLM's Prometheus page."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._series: dict[str, Any] = {}
        for metric in METRICS:
            counter = metric.kind is Kind.COUNTER
            make = self._counter_cls if counter else self._gauge_cls
            self._series[metric.name] = make(
                name=metric.name.removesuffix("_total") if counter else metric.name,
                documentation=metric.description,
                labelnames=[*self._labelnames, *metric.labels],
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one interval's samples."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, amount in transfer_stats_data.items():
            metric, _, label = name.partition(".")
            series = self._series[metric].labels(*engine, *([label] if label else []))
            if _kind(name) is Kind.GAUGE:
                series.set(amount)
            else:
                series.inc(amount)
