"""`python -m kvist.bench.routing`: what each policy of the router makes of real engines."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from kvist.bench.routing.replicas import MODEL, Shape, serving
from kvist.bench.routing.report import HEADS, OURS, cells, rows, with_section
from kvist.bench.routing.run import Outcomes, Settings, measure
from kvist.bench.routing.texts import find_texts
from kvist.bench.samples import write
from kvist.bench.screen import screen
from kvist.bench.smollm2 import ensure_smollm2
from kvist.core.errors import ConfigError, KvistError
from kvist.router.choice import POLICIES

_TRACES = Path("../shared/traces")
_ENGINE = "vLLM on CPUs, SmolLM2-135M in bfloat16"
_FAILED = 2


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m kvist.bench.routing",
        description="The same agents and questions to the same vLLM replicas, under one policy "
        "after another.",
        epilog="Example:\n  python -m kvist.bench.routing --rounds 2 --json routing.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in ("replicas", "rounds", "sessions", "turns", "questions", "documents",
                 "prompt_chars", "answer_tokens", "kv_tokens", "seed"):  # fmt: skip
        flag, value = "--" + name.replace("_", "-"), getattr(default, name)
        parser.add_argument(flag, type=int, default=value, metavar="N", help=f"default: {value}")
    parser.add_argument(
        "--load-ratio", type=float, default=default.load_ratio, metavar="X",
        help="requests a second over what the replicas could serve without a cache "
        f"(default: {default.load_ratio:g})",
    )  # fmt: skip
    parser.add_argument(
        "--policy", action="append", metavar="NAME",
        help=f"compare this with kvist; may be repeated (default: {', '.join(default.policies)})",
    )  # fmt: skip
    parser.add_argument(
        "--traces", type=Path, default=_TRACES, metavar="DIR",
        help=f"folder of recorded texts; without them they are made up (default: {_TRACES})",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every answer there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table into that page")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; 2 if it could not."""
    args = build_parser().parse_args(argv)
    try:
        settings = _settings(args)
        found = _measured(settings, args.traces)
    except (KvistError, OSError) as error:
        print(f"kvist.bench.routing: {error}", file=sys.stderr)
        return _FAILED
    if args.json:
        write(found, args.json)
    if args.page:
        args.page.write_text(with_section(args.page.read_text(), found))
    table = Table(*HEADS, box=None, pad_edge=False)
    for row in rows(found):
        table.add_row(*cells(row))
    screen().print(table)
    return 0


def _settings(args: argparse.Namespace) -> Settings:
    told = {name: value for name, value in vars(args).items() if name in Settings.__struct_fields__}
    if args.policy:
        told["policies"] = tuple(dict.fromkeys((OURS, *args.policy)))
    settings = msgspec.convert(told, Settings)
    for policy in settings.policies:
        if policy not in POLICIES:
            remedy = f"take {', '.join(POLICIES)}"
            raise ConfigError(f"unknown policy {policy!r}", path="--policy", remedy=remedy)
    for name in ("replicas", "rounds", "prompt_chars", "answer_tokens", "kv_tokens"):
        if getattr(settings, name) < 1:
            raise ConfigError("must be at least 1", path="--" + name.replace("_", "-"))
    if not settings.load_ratio > 0:
        raise ConfigError("must be above 0", path="--load-ratio")
    if settings.sessions * settings.turns + settings.questions < 1:
        raise ConfigError("there is nothing to ask", path="--questions")
    return settings


def _measured(settings: Settings, traces: Path) -> Outcomes:
    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    texts, model = find_texts(traces), ensure_smollm2("bfloat16", tell)
    shape = Shape(model, settings.block_tokens, settings.kv_tokens)
    with tempfile.TemporaryDirectory(prefix="kvist-routing-") as work:
        tell(f"starting {settings.replicas} replicas")
        with serving(shape, settings.replicas, Path(work)) as urls:
            options = [f"--set=gateway.tokenizer={model}"]
            return measure(
                settings, texts, urls, Path(work), tell,
                model=MODEL, engine=_ENGINE, options=options,
            )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
