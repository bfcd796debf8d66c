"""Dispatches `kvist COMMAND`; a command's module is imported only when it is the one called.

Exit codes: 0 done, 1 the command found a fault (a corrupt frame, a configuration that would not
start), 2 it could not do what was asked (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import NoReturn

from kvist.core.errors import KvistError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """A word that users say, the module that does it, and what it does in one line."""

    name: str
    module: str
    summary: str


COMMANDS: tuple[Command, ...] = (
    Command("serve", "serve", "serve a model with vLLM and Kvist"),
    Command("node", "node", "share one store between the engines of this host"),
    Command("gateway", "gateway", "serve several engines at one OpenAI-compatible address"),
    Command("up", "up", "start nodes and engines on a Ray cluster"),
    Command("down", "down", "end what `kvist up` started"),
    Command("cache", "cache", "look at a node's blocks, pin, move and evict them"),
    Command("demo", "demo", "show on this machine what Kvist saves"),
    Command("config", "config_cmd", "show or check the configuration"),
    Command("du", "du", "show what the SSD cache holds"),
    Command("verify", "verify", "read the SSD cache and check every checksum"),
    Command("codec", "codec", "list codecs, and profile a model for cachegen"),
    Command("replay", "replay", "replay a trace against eviction policies"),
    Command("sim", "sim", "simulate a cluster of engines"),
    Command("advise", "advise", "say whether a cache would pay on your traffic"),
    Command("quality", "quality", "measure what codecs and blending do to a model's answers"),
    Command("record", "record", "show a recording of your traffic, or how to make one"),
)


class Parser(argparse.ArgumentParser):
    """An argument parser whose usage errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exits with status 2 and `kvist: error: ...` on stderr."""
        self.exit(EXIT_ERROR, f"kvist: error: {message} (see {self.prog} --help)\n")


def available() -> list[Command]:
    """The commands whose module is installed."""
    return [c for c in COMMANDS if importlib.util.find_spec(f"kvist.cli.{c.module}")]


def build_parser(wanted: str | None) -> argparse.ArgumentParser:
    """The whole parser, with the options of command `wanted` only; of all for `"*"`."""
    parser = Parser(
        prog="kvist",
        description="Keeps the KV cache that LLM engines throw away.",
        epilog="Example:\n  kvist config show",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"kvist {_version()}", help="show the version"
    )
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    for command in available():
        if wanted in (command.name, "*"):
            importlib.import_module(f"kvist.cli.{command.module}").add_parser(subparsers)
        else:
            subparsers.add_parser(command.name, help=command.summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    # The top level has no option that takes a value, so the first word is the command.
    wanted = next((a for a in args if not a.startswith("-")), None)
    try:
        parsed = build_parser(wanted).parse_args(args)
        modules = {command.name: command.module for command in COMMANDS}
        code: int = importlib.import_module(f"kvist.cli.{modules[parsed.command]}").run(parsed)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has enough; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KvistError, OSError) as error:
        print(f"kvist: error: {_one_line(error)}", file=sys.stderr)
        return EXIT_ERROR


def _one_line(error: Exception) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:  # without "[Errno 2]"
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(text.split())


def _version() -> str:
    try:
        return metadata.version("kvist")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
