"""`kvist codec`: the codecs of blocks, and the tables that `cachegen` needs of a model."""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvist.cli import screen
from kvist.core.errors import ConfigError

if TYPE_CHECKING:
    from kvist.codec.cachegen.table import ProfileTable

_CONTEXTS = 12
_DEMO = "smollm2-135m"


def add_parser(subparsers: Any) -> None:
    """Adds `codec`."""
    parser = screen.add_command(
        subparsers,
        "codec",
        summary="list codecs, and profile a model for cachegen",
        example="kvist codec list",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = screen.add_command(
        actions,
        "list",
        summary="list the codecs that store.ssd.codec takes",
        example="kvist codec list --json",
    )
    screen.add_json_option(listing)
    profile = screen.add_command(
        actions,
        "profile",
        summary="write the table that cachegen needs of a model",
        details="Runs the model over texts and notes what its KV looks like and how much its "
        "answers mind errors in it. Needs the extra `transformers`; a text like the traffic to "
        "come makes a better table than the default.",
        example=f"kvist codec profile {_DEMO} --contexts 2 --out {_DEMO}.kvcg",
    )
    profile.add_argument(
        "model", metavar="MODEL", help=f"folder of a Hugging Face model, or {_DEMO}"
    )
    profile.add_argument(
        "--texts", metavar="FILE", type=Path, help="plain text (default: Kvist's own documents)"
    )
    profile.add_argument(
        "--out", metavar="FILE", type=Path, help="where to write (default: NAME.kvcg, here)"
    )
    profile.add_argument(
        "--contexts",
        metavar="N",
        type=int,
        default=_CONTEXTS,
        help=f"contexts of 640 tokens at most, spread over the text ({_CONTEXTS})",
    )
    screen.add_json_option(profile)


def run(args: argparse.Namespace) -> int:
    """Lists codecs, or profiles a model.

    Raises:
        ConfigError: an extra is missing, the model cannot be loaded or profiled, the text is short.
    """
    return _list(args) if args.action == "list" else _profile(args)


def _list(args: argparse.Namespace) -> int:
    from kvist.codec.cachegen.levels import LEVELS
    from kvist.codec.chain import CODECS
    from kvist.codec.frame import RAW_CODEC

    rows = [(RAW_CODEC, True, False, "as it is")]
    rows += [(name, kind.exact, False, kind.summary) for name, kind in CODECS.items()]
    rows += [(level.name, False, True, level.summary) for level in LEVELS]
    if args.json:
        names = ("name", "exact", "needs_table", "summary")
        screen.print_json([dict(zip(names, row, strict=True)) for row in rows])
        return 0
    grid = screen.table("codec", "every bit", "table", "what it does")
    for name, exact, table, summary in rows:
        grid.add_row(name, "yes" if exact else "no", "needed" if table else "", summary)
    screen.console().print(grid)
    print("Behind any of them, +aead seals blocks with store.ssd.keys.")
    return 0


def _profile(args: argparse.Namespace) -> int:
    if args.contexts < 1:
        raise ConfigError("a profile needs a context", path="--contexts")
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"a profile needs {package}", remedy="pip install 'kvist[transformers]'"
            )
    from kvist.bench.codec.tables import default_texts, profile_folder
    from kvist.bench.smollm2 import ensure_smollm2

    text = args.texts.read_text(errors="replace") if args.texts else default_texts()
    demo = args.model == _DEMO
    folder = ensure_smollm2("bfloat16", progress=_say) if demo else Path(args.model)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not the folder of a model", path="MODEL")
    out = args.out or Path(f"{args.model if demo else folder.resolve().name}.kvcg")
    with screen.progress_bars() as bars:
        task = bars.add_task("profiling", total=args.contexts)
        table = profile_folder(
            folder,
            text,
            contexts=args.contexts,
            progress=lambda done, of: bars.update(task, completed=done, total=of),
        )
    write_table(table, out)
    _report(args, table, out)
    return 0


def write_table(table: ProfileTable, out: Path) -> None:
    """Writes a table whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    handle, name = tempfile.mkstemp(dir=out.absolute().parent, prefix=f".{out.name}-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(table.file_bytes)
        Path(name).chmod(0o644)
        Path(name).replace(out)
    finally:
        Path(name).unlink(missing_ok=True)


def _report(args: argparse.Namespace, table: ProfileTable, out: Path) -> None:
    shape, size_bytes = table.shape, len(table.file_bytes)
    if args.json:
        screen.print_json(
            {
                "file": str(out),
                "bytes": size_bytes,
                "id": table.id.hex(),
                "layers": shape.layers,
                "kv_heads": shape.kv_heads,
                "head_dim": shape.head_dim,
                "keys_turned_back": bool(len(table.inv_freq)),
            }
        )
        return
    turned = "keys turned back by RoPE" if len(table.inv_freq) else "keys as they are"
    print(f"{out}: {screen.format_bytes(size_bytes)}, id {table.id.hex()}, {turned}")
    print(f"use it: store.ssd.codec=cachegen-3 store.ssd.table={out}")


def _say(text: str) -> None:
    screen.progress_console().print(text)
