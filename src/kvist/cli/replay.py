"""`kvist replay`: what each eviction policy would have saved on a trace, at several capacities."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvist.cli import screen
from kvist.core.errors import ConfigError
from kvist.sim.contenders import NAMES, contender
from kvist.sim.formats import read_trace
from kvist.sim.plots import check_plot
from kvist.sim.replay import Result, replay
from kvist.sim.spans import SpanResult, replay_spans, with_long_keys
from kvist.sim.traces import Trace

_PREFIX, _SPAN = "prefix", "span"
# Without a wish: policies beside each other, or what could be reused at all.
_POLICIES = {_PREFIX: "value,leaf-lru,belady", _SPAN: "leaf-lru"}
_CAPACITIES = {_PREFIX: "1%,3%,10%", _SPAN: "100%"}


def add_parser(subparsers: Any) -> None:
    """Adds `replay`."""
    parser = screen.add_command(
        subparsers,
        "replay",
        summary="replay a trace against eviction policies",
        details="A block is a hit only if every earlier block of its request is one; with --reuse "
        "span, text that is cached elsewhere in another prompt is found as well. Reads "
        "Mooncake, Bailian, RAGPulse, LMCache agent, AIBrix and LLMServingSim JSON lines, Azure, "
        "BurstGPT and Vidur CSV, plain or .gz.",
        example="kvist replay trace.jsonl --policy value,leaf-lru,belady --capacity 1%,3%,10%",
    )
    parser.add_argument("trace", metavar="TRACE", type=Path, help="the trace")
    parser.add_argument(
        "--policy",
        metavar="NAMES",
        help=f"policies, separated by commas, or all: {', '.join(NAMES)} "
        f"(default: {_POLICIES[_PREFIX]}; for spans {_POLICIES[_SPAN]})",
    )
    parser.add_argument(
        "--capacity",
        metavar="SIZES",
        help="blocks, or shares of the trace's different blocks (default: 1%%,3%%,10%%; for "
        "spans 100%%)",
    )
    parser.add_argument(
        "--reuse",
        choices=(_PREFIX, _SPAN),
        default=_PREFIX,
        help="what may be reused: the beginning of a prompt, or spans anywhere in it, which needs "
        "a trace that says what its prompts are made of (default: prefix)",
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw into a .png or .svg")
    screen.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Replays every policy at every capacity and prints what it saved.

    Raises:
        ConfigError: an option cannot be used.
        FormatError: the trace cannot be read; names file, line and field.
        OSError: the trace cannot be read, or the plot not written.
    """
    names = _policies(args.policy or _POLICIES[args.reuse])
    sizes = args.capacity or _CAPACITIES[args.reuse]
    _check_capacities(sizes)
    if args.plot is not None:
        check_plot(args.plot)
    with screen.progress_bars() as bar:
        reading = bar.add_task("read", total=None)
        trace = read_trace(args.trace, lambda lines: bar.update(reading, completed=lines))
        bar.remove_task(reading)
        if not trace.accesses_blocks:
            raise ConfigError("no request has a block", path=str(args.trace))
        if args.reuse == _SPAN:
            trace = with_long_keys(trace)
        capacities = _capacities(sizes, trace)
        results: list[Result | SpanResult] = []
        work = bar.add_task("", total=len(names) * len(capacities) * len(trace.requests))
        for name in names:
            for capacity in capacities:
                done = len(results) * len(trace.requests)
                bar.update(work, description=f"{name} {capacity}", completed=done)
                run_one = replay_spans if args.reuse == _SPAN else replay
                results.append(
                    run_one(
                        trace,
                        contender(name, trace, capacity),
                        capacity,
                        progress=lambda n, done=done: bar.update(work, completed=done + n),  # type: ignore[misc]
                    )
                )
    if args.json:
        screen.print_json([dataclasses.asdict(result) for result in results])
    else:
        _print(trace, results)
    if args.plot is not None:
        _draw(args.plot, trace, results)
    return 0


def _policies(text: str) -> list[str]:
    names = list(NAMES) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in NAMES:
            raise ConfigError(
                f"there is no policy {name!r}", path="--policy", remedy=f"take {', '.join(NAMES)}"
            )
    return list(dict.fromkeys(names))


def _check_capacities(text: str) -> None:
    for part in text.split(","):
        _capacity(part.strip(), 1)


def _capacities(text: str, trace: Trace) -> list[int]:
    sizes = [_capacity(part.strip(), trace.unique_blocks) for part in text.split(",")]
    return list(dict.fromkeys(sizes))


def _capacity(text: str, unique_blocks: int) -> int:
    try:
        if text.endswith("%"):
            share = float(text[:-1])
            blocks = max(1, int(unique_blocks * share / 100)) if 0 < share <= 100 else 0
        else:
            blocks = int(text)
    except ValueError:
        blocks = 0
    if blocks < 1:
        raise ConfigError(
            f"{text!r} is no capacity",
            path="--capacity",
            remedy="write a number of blocks, or a share such as 3%",
        )
    return blocks


def _print(trace: Trace, results: Sequence[Result | SpanResult]) -> None:
    out = screen.console()
    out.print(
        f"{trace.name}: {len(trace.requests):,} requests, {trace.accesses_blocks:,} accesses to "
        f"{trace.unique_blocks:,} blocks of {trace.block_tokens} tokens"
    )
    rows = [_cells(result) for result in results]
    grid = screen.table("policy", *rows[0], right=frozenset(rows[0]))
    for result, row in zip(results, rows, strict=True):
        grid.add_row(result.policy, *row.values())
    out.print(grid)


def _cells(result: Result | SpanResult) -> dict[str, str]:
    """A row of the table, by column."""
    if isinstance(result, SpanResult):
        return {
            "capacity": f"{result.capacity_blocks:,}",
            "prefix tokens": f"{result.prefix_token_ratio:.1%}",
            "with spans": f"{result.span_token_ratio:.1%}",
            "ideal": f"{result.ideal_token_ratio:.1%}",
            "spans": f"{result.spans:,}",
            "mean tokens": f"{result.span_tokens_mean:,.0f}",
            "blocks written": f"{result.blocks_written:,}",
        }
    return {
        "capacity": f"{result.capacity_blocks:,}",
        "block hits": f"{result.block_hit_ratio:.1%}",
        "token hits": f"{result.token_hit_ratio:.1%}",
        "FLOPs saved": f"{result.flops_saved_ratio:.1%}",
        "blocks written": f"{result.blocks_written:,}",
    }


def _drawn_ratio(result: Result | SpanResult) -> float:
    if isinstance(result, SpanResult):
        return result.span_token_ratio
    return result.block_hit_ratio


def _draw(path: Path, trace: Trace, results: Sequence[Result | SpanResult]) -> None:
    from matplotlib.figure import Figure

    spans = isinstance(results[0], SpanResult)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(result.policy for result in results):
        points = sorted((r.capacity_blocks, _drawn_ratio(r)) for r in results if r.policy == name)
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xscale("log")
    axes.set_xlabel(f"capacity (blocks of {trace.block_tokens} tokens)")
    axes.set_ylabel("token hit ratio with spans" if spans else "block hit ratio")
    axes.set_ylim(bottom=0)
    axes.set_title(trace.name)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path)
