"""`kvist advise`: whether a KV cache would pay on your traffic, and what DRAM and SSD to buy."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from kvist.cli import screen
from kvist.core.errors import ConfigError, FormatError
from kvist.cost.catalogue import model as catalogue_model
from kvist.cost.device import Hardware, device
from kvist.cost.model import ModelShape, shape_from_config
from kvist.sim.advise.advice import Advice
from kvist.sim.advise.page import page
from kvist.sim.advise.question import (
    QUICK,
    Disks,
    Effort,
    Market,
    Question,
    usual_price,
)
from kvist.sim.advise.run import advise
from kvist.sim.advise.tables import Grid, grids
from kvist.sim.des.spec import Slo
from kvist.sim.formats import read_trace
from kvist.sim.synthetic import KINDS, USUAL, synthetic
from kvist.sim.traces import Trace

_WRITE_SHARE = 12 / 26  # of the read bandwidth, as NVMe drives have it


def add_parser(subparsers: Any) -> None:
    """Adds `advise`."""
    parser = screen.add_command(
        subparsers,
        "advise",
        summary="say whether a cache would pay on your traffic",
        details="Reads a trace of any format of `kvist replay`, or a recording of `kvist record`, "
        "replays it past caches of several sizes, simulates the cluster with and without Kvist, "
        "and says what DRAM and SSD are worth buying, or to turn it off.",
        example="kvist advise --synthetic chat --model llama-3.1-70b --device h100 --count 8 "
        "--quick",
    )
    parser.add_argument("trace", metavar="TRACE", nargs="?", type=Path, help="the trace")
    _add_traffic(parser)
    _add_hardware(parser)
    _add_prices(parser)
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with plots")
    parser.add_argument("--quick", action="store_true", help="smaller samples: seconds, rougher")
    screen.add_json_option(parser)


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--synthetic",
        metavar="KIND",
        help=f"instead of a trace: {', '.join(sorted(KINDS))}",
    )
    group.add_argument("--requests", type=int, metavar="N", help="how many synthetic requests")
    group.add_argument("--rate", type=float, metavar="RPS", help="their rate a second")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of all draws (default: 0)")


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and hardware")
    group.add_argument(
        "--model",
        default="llama-3.1-70b",
        metavar="NAME",
        help="of the catalogue, or the path of a config.json (default: llama-3.1-70b)",
    )
    group.add_argument("--kv-dtype", default="auto", metavar="TYPE", help="such as fp8")
    group.add_argument("--device", default="h100", metavar="NAME", help="default: h100")
    group.add_argument(
        "--count", type=int, default=8, metavar="N", help="devices of one replica (default: 8)"
    )
    group.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="replicas (default: as few as the engine alone can do with)",
    )
    group.add_argument(
        "--host-dram",
        type=float,
        metavar="GB",
        help="DRAM of a node that comes with its devices (default: as much as HBM)",
    )
    group.add_argument(
        "--ssd-bandwidth",
        type=float,
        default=26.0,
        metavar="GBPS",
        help="read GB/s of all SSDs of a node (default: 26, four NVMe drives)",
    )
    group.add_argument(
        "--ssd-endurance",
        type=float,
        default=1.0,
        metavar="DWPD",
        help="drive writes a day that the SSDs are made for (default: 1)",
    )
    group.add_argument(
        "--ttft-slo", type=float, default=10.0, metavar="S", help="seconds (default: 10)"
    )
    group.add_argument(
        "--itl-slo",
        type=float,
        default=200.0,
        metavar="MS",
        help="milliseconds, mean of a request's longest tenth of token gaps (default: 200)",
    )


def _add_prices(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prices in dollars")
    group.add_argument(
        "--device-price", type=float, metavar="USD", help="a device an hour (default: by device)"
    )
    group.add_argument(
        "--dram-price",
        type=float,
        default=0.005,
        metavar="USD",
        help="a GB of DRAM an hour (default: 0.005)",
    )
    group.add_argument(
        "--ssd-price",
        type=float,
        default=0.00015,
        metavar="USD",
        help="a GB of SSD an hour (default: 0.00015)",
    )
    group.add_argument(
        "--drive-price",
        type=float,
        default=120.0,
        metavar="USD",
        help="a TB of new SSD, which writes wear off (default: 120)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the advice.

    Raises:
        ConfigError: an option cannot be used.
        FormatError: the trace cannot be read; names file, line and field.
        OSError: the trace cannot be read, or the page not written.
    """
    question = _question(args)
    if (args.trace is None) == (args.synthetic is None):
        raise ConfigError("give either a trace or --synthetic KIND", path="TRACE")
    if args.html is not None and not args.html.absolute().parent.is_dir():
        raise ConfigError(f"{args.html.absolute().parent} is not a folder", path="--html")
    with screen.progress_bars() as bars:
        trace = _trace(args, bars)
        stages = {name: bars.add_task(name, total=1.0) for name in ("replay", "simulate")}
        advice = advise(
            trace, question, lambda stage, share: bars.update(stages[stage], completed=share)
        )
    if args.html is not None:
        write_whole(args.html, page(advice))
    if args.json:
        screen.print_json(advice.to_dict())
    else:
        _print(advice, screen.console())
    return 0


def _question(args: argparse.Namespace) -> Question:
    kind = device(args.device)
    price = usual_price(kind.name) if args.device_price is None else args.device_price
    read = args.ssd_bandwidth * 1e9
    return Question(
        model=_model(args.model, args.kv_dtype),
        hardware=Hardware(kind, args.count),
        market=Market(price, args.dram_price, args.ssd_price),
        disks=Disks(
            read,
            read * _WRITE_SHARE,
            endurance_dwpd=args.ssd_endurance,
            dollars_per_tb=args.drive_price,
        ),
        slo=Slo(ttft_s=args.ttft_slo, tbt_s=args.itl_slo / 1e3),
        nodes=args.nodes,
        dram_bytes=None if args.host_dram is None else int(args.host_dram * 1e9),
        effort=QUICK if args.quick else Effort(),
        seed=args.seed,
    )


def _model(name: str, kv_dtype: str) -> ModelShape:
    path = Path(name)
    if path.suffix != ".json":
        return catalogue_model(name, kv_dtype=kv_dtype)
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise FormatError(f"{path}: no JSON: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{path}: no JSON object")
    return shape_from_config(found, name=path.absolute().parent.name, kv_dtype=kv_dtype)


def _trace(args: argparse.Namespace, bars: Progress) -> Trace:
    if args.synthetic is None:
        reading = bars.add_task("read", total=None)
        trace = read_trace(args.trace, lambda lines: bars.update(reading, completed=lines))
        bars.remove_task(reading)
        if not trace.accesses_blocks:
            raise ConfigError("no request has a block", path=str(args.trace))
        return trace
    requests, rate = USUAL.get(args.synthetic, (1, 1.0))
    return synthetic(
        args.synthetic,
        requests if args.requests is None else args.requests,
        rate if args.rate is None else args.rate,
        args.seed,
    )


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that it is there whole, or as it was before.

    Raises:
        OSError: it cannot be written.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:  # Ctrl-C too
        Path(name).unlink(missing_ok=True)
        raise


def _print(advice: Advice, out: Console) -> None:
    out.print(f"{advice.verdict.value}: {advice.sentence}", style="bold")
    for grid in grids(advice):
        out.print()
        out.print(grid.title, style="bold")
        out.print(_table(grid))


def _table(grid: Grid) -> Any:
    figures = frozenset() if grid.prose else frozenset(grid.columns[1:])
    shown = screen.table(*grid.columns, right=figures)
    shown.show_header = any(grid.columns)
    for row in grid.rows:
        shown.add_row(*row)
    return shown
