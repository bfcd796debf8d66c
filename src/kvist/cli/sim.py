"""`kvist sim`: plays traffic against a simulated cluster, and runs side by side."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.progress import Progress

from kvist.cli import screen
from kvist.core.errors import ConfigError
from kvist.sim.des.cluster import simulate
from kvist.sim.des.report import Quantiles, Report
from kvist.sim.des.scenario import Scenario, TraceSource, load_scenario
from kvist.sim.traces import Trace

_MAX_RUNS = 32
_NOTHING = ("0", "0.0%", "0 / 0", "0 B / 0.0%")  # a line of these in every run says nothing


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """One column of the table."""

    label: str
    scenario: Scenario


def add_parser(subparsers: Any) -> None:
    """Adds `sim`."""
    parser = screen.add_command(
        subparsers,
        "sim",
        summary="simulate a cluster of engines",
        details="Plays a trace or synthetic traffic against engines, links, tiers, a router and "
        "faults on a virtual clock, with the eviction policies and time models that serve. The "
        "same scenario and seed give the same figures, bit by bit.",
        example="kvist sim examples/agents.yaml --compare router=random,least-loaded,cache-aware",
    )
    parser.add_argument("scenario", metavar="SCENARIO", type=Path, help="the scenario, in YAML")
    parser.add_argument("--seed", type=int, metavar="N", help="seed in place of the scenario's")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="set a key of the scenario, such as store.dram.policy=lru; may be repeated",
    )
    parser.add_argument(
        "--compare",
        metavar="KEY=V1,V2,...",
        help="one run for each value of a key, side by side, such as nodes=4,8,16",
    )
    screen.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the scenario, once or for each value, and prints what was measured.

    Raises:
        ConfigError: the scenario or an option cannot be used.
        FormatError: the trace cannot be read; names file, line and field.
        OSError: a file cannot be read.
    """
    runs = _runs(args)
    for one in runs:
        one.scenario.cluster()  # all that is wrong with any of them is said before the first runs
    with screen.progress_bars() as bar:
        reports = _simulate_all(runs, bar)
    if args.json:
        named = zip(runs, reports, strict=True)
        found = [{"run": one.label} | report.to_dict() for one, report in named]
        screen.print_json(found if args.compare else found[0])
    else:
        _print(runs, reports)
    return 0


def _runs(args: argparse.Namespace) -> list[_Run]:
    changes = dict(_change(text, "--set") for text in args.set)
    if args.seed is not None:
        changes["seed"] = args.seed
    if not args.compare:
        return [_Run(args.scenario.name, load_scenario(args.scenario, changes))]
    key, values = _change(args.compare, "--compare", split=True)
    if not isinstance(values, list) or not 0 < len(values) <= _MAX_RUNS:
        raise ConfigError(f"takes 1 to {_MAX_RUNS} values", path="--compare")
    return [
        _Run(f"{key}={value}", load_scenario(args.scenario, changes | {key: value}))
        for value in values
    ]


def _change(text: str, option: str, *, split: bool = False) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise ConfigError(f"{text!r} has no value", path=option, remedy=f"write {option} key=value")
    try:
        parts = [yaml.safe_load(part) for part in (value.split(",") if split else [value])]
    except yaml.YAMLError as error:
        raise ConfigError(f"{value!r} is no value", path=option) from error
    return key.strip().removeprefix("$."), parts if split else parts[0]


def _simulate_all(runs: Sequence[_Run], bar: Progress) -> list[Report]:
    traces: dict[TraceSource, Trace] = {}
    reports = []
    for one in runs:
        source = one.scenario.trace
        if source not in traces:
            reading = bar.add_task("read", total=None)
            traces[source] = one.scenario.read_trace(_advance(bar, reading))
            bar.remove_task(reading)
        trace = traces[source]
        if not trace.requests:
            raise ConfigError("has no request", path="$.trace", origin=str(source.path))
        limit = one.scenario.arrivals.limit or len(trace.requests)
        task = bar.add_task(one.label, total=min(limit, len(trace.requests)))
        reports.append(
            simulate(
                one.scenario.cluster(), trace, seed=one.scenario.seed, progress=_advance(bar, task)
            )
        )
        bar.remove_task(task)
    return reports


def _advance(bar: Progress, task: Any) -> Callable[[int], None]:
    return lambda done: bar.update(task, completed=done)


def _print(runs: Sequence[_Run], reports: Sequence[Report]) -> None:
    out = screen.console()
    labels = [one.label for one in runs]
    grid = screen.table("", *labels, right=frozenset(labels))
    columns = [_measures(report) for report in reports]
    for name in columns[0]:
        if all(column[name] in _NOTHING for column in columns):
            continue
        grid.add_row(name, *(column[name] for column in columns))
    out.print(grid)
    slo = reports[0].slo
    out.print(
        f"\nSLO: TTFT {_ms(slo.ttft_s)}, TBT {_ms(slo.tbt_s)} (mean of the longest 10 % of gaps)"
    )
    for one, report in zip(runs, reports, strict=True):
        reasons = ", ".join(f"{name} {count:,}" for name, count in report.load_reasons.items())
        if reasons:
            out.print(f"Loads, {one.label}: {reasons}")
        refusals = ", ".join(f"{name} {count:,}" for name, count in report.refusals.items())
        if refusals:
            out.print(f"Not served, {one.label}: {refusals}")


def _measures(report: Report) -> dict[str, str]:
    """Name → text of every line of the table."""
    lines = {
        "requests": f"{report.requests:,}",
        "finished / rejected / failed": f"{report.finished:,} / {report.rejected:,} / "
        f"{report.failed:,}",
        "preempted / rerouted": f"{report.preempted:,} / {report.rerouted:,}",
        "TTFT mean": _ms(report.ttft_s.mean),
        "TTFT p50 / p90 / p99": _three(report.ttft_s),
        "TBT p50 / p90 / p99": _three(report.tbt_s),
        "ITL p50 / p99": f"{_ms(report.itl_s.p50)} / {_ms(report.itl_s.p99)}",
        "goodput": f"{report.goodput_rps:.3f} /s",
        "within the SLO": f"{report.effective_ratio:.1%}",
        "tokens not computed": f"{report.hit_ratio:.1%}",
    }
    for tier, tokens in report.hit_tokens.items():
        lines[f"  from {tier}"] = f"{tokens / max(1, report.input_tokens):.1%}"
    lines["prefill, device hours"] = f"{report.prefill_device_s / 3600:,.2f}"
    for kind, link in report.links.items():
        used = f"{screen.format_bytes(int(link.moved_bytes))} / {link.utilisation:.1%}"
        lines[f"{kind} moved / used"] = used
    lines["blocks written to SSD"] = f"{report.ssd_written_blocks:,}"
    return lines


def _three(values: Quantiles) -> str:
    return f"{_ms(values.p50)} / {_ms(values.p90)} / {_ms(values.p99)}"


def _ms(seconds: float) -> str:
    """Milliseconds, from ten seconds on seconds."""
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds * 1e3:,.0f} ms"
