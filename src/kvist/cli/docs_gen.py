"""Writes the reference pages from the code: `python -m kvist.cli.docs_gen [--check] [DOCS]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvist.cli.main import build_parser
from kvist.config import format_size, knobs
from kvist.metrics import METRICS

_NOTE = "<!-- Written by `make docs`; a test fails when it is out of date. -->\n"

_CONFIGURATION = """
# Configuration

Every knob has a default, and the defaults work. A value comes from, the last one winning:

1. the default;
2. a YAML file: `--config FILE`, else the file that `KVIST_CONFIG` names, else `./kvist.yaml`;
3. an environment variable, such as `KVIST_STORE__DRAM__CAPACITY=8GiB` (two underscores for a dot);
4. the engine: `kv_connector_extra_config` of vLLM, nested or with dotted keys;
5. `--set store.dram.capacity=8GiB` of a command.

```yaml
# kvist.yaml
store:
  dram:
    capacity: 8GiB
  ssd:
    path: /var/cache/kvist
    capacity: 200GiB
```

Sizes are bytes, or a number with a unit: `KiB MiB GiB TiB` (or `K M G T`) are powers of 1024,
`KB MB GB TB` powers of 1000. An unknown knob or a value that cannot be used is an error that names
the knob, where it was set, and what to write instead. `kvist config show` prints what is in force
and where it came from; `kvist config check` tries it on this machine.

"""

_METRICS = """
# Metrics

Names as Prometheus shows them. A tier is `dram`, `ssd` or `remote`.

| metric | kind | unit | labels | meaning |
|---|---|---|---|---|
"""

_CLI = """
# Commands

Every command takes `--help`. Errors are one line on stderr. Exit codes: 0 done; 1 the command found
a fault, such as a corrupt frame; 2 it could not do what was asked; 130 interrupted.

"""


def pages() -> dict[str, str]:
    """The text of every generated page, by file name."""
    return {
        "configuration.md": _NOTE + _CONFIGURATION + _configuration(),
        "metrics.md": _NOTE + _METRICS + _metrics(),
        "cli.md": _NOTE + _CLI + "\n".join(_commands()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the pages; with `--check` only says which are out of date, and returns 1 if any is."""
    parser = argparse.ArgumentParser(prog="python -m kvist.cli.docs_gen", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("docs", nargs="?", default="docs", type=Path, help="folder of the pages")
    args = parser.parse_args(argv)
    stale = [
        name
        for name, text in pages().items()
        if not (page := args.docs / name).is_file() or page.read_text() != text
    ]
    for name in stale:
        if args.check:
            print(f"docs_gen: {name} is out of date; run `make docs`", file=sys.stderr)
        else:
            (args.docs / name).write_text(pages()[name])
    return int(args.check and bool(stale))


def _configuration() -> str:
    rows = ["| knob | default | accepted | meaning |", "|---|---|---|---|"]
    for path, knob in knobs().items():
        default = knob.default
        if knob.is_size and isinstance(default, int):
            default = format_size(default)
        text = str(default).lower() if isinstance(default, bool) else str(default)
        rows.append(f"| `{path}` | `{text}` | {knob.choices()} | {knob.description} |")
    return "\n".join(rows) + "\n"


def _metrics() -> str:
    return "".join(
        f"| `{m.name}` | {m.kind.value} | {m.unit} | "
        f"{', '.join(f'`{label}`' for label in m.labels)} | {m.description} |\n"
        for m in METRICS
    )


def _commands() -> Iterator[str]:
    yield from _command(build_parser("*"), with_heading=False)


def _command(parser: argparse.ArgumentParser, *, with_heading: bool) -> Iterator[str]:
    """Markdown of one parser and those below it, independent of the terminal and of argparse's
    own layout, which differs between Python versions."""
    actions = [a for a in parser._actions if not isinstance(a, argparse._SubParsersAction)]
    nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if with_heading:
        yield f"## {parser.prog}\n"
        yield f"{' '.join((parser.description or '').split())}\n"
        rows = [_option(a) for a in actions if not isinstance(a, argparse._HelpAction)]
        if rows:
            yield "| argument | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"
        example = (parser.epilog or "").removeprefix("Example:")
        lines = [line.strip() for line in example.splitlines() if line.strip()]
        yield "```sh\n" + "\n".join(lines) + "\n```\n"
    for action in nested:
        for child in action.choices.values():
            yield from _command(child, with_heading=True)


def _option(action: argparse.Action) -> str:
    names = ", ".join(f"`{o}`" for o in action.option_strings) or f"`{action.dest.upper()}`"
    if action.option_strings and action.nargs != 0:
        value = action.metavar or action.dest.upper()
        names = ", ".join(f"`{o} {value}`" for o in action.option_strings)
    default = action.default
    text = "" if default in (None, False, [], argparse.SUPPRESS) else f"`{default}`"
    meaning = (action.help or "") % {"default": default, "prog": "kvist"}
    return f"| {names} | {text} | {meaning.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    sys.exit(main())
