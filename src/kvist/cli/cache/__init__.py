"""`kvist cache`: a running node's blocks: lists, sums, pins, moves, evicts, clears."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from kvist.cli import screen
from kvist.core.errors import ConfigError, KvistError

FAILED = 1
_LIMIT = 100
_WARM_S = 60.0
_KEY_HELP = (
    "a key, or the beginning of one as `kvist cache ls` prints it: the prefix that ends there"
)


def add_parser(subparsers: Any) -> None:
    """Adds `cache`."""
    parser = screen.add_command(
        subparsers,
        "cache",
        summary="look at a node's blocks, pin, move and evict them",
        details="Asks the node that runs. What lies in folders while none runs, `kvist du` shows.",
        example="kvist cache ls",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_looks(actions)
    _add_orders(actions)


def _add_looks(actions: Any) -> None:
    listing = _add(
        actions,
        "ls",
        "list runs of blocks by tier and tenant",
        "A run is named by its last key, which stands for all blocks before it.",
        "kvist cache ls --tier dram",
    )
    listing.add_argument("key", nargs="?", metavar="KEY", help=f"{_KEY_HELP}, block by block")
    listing.add_argument("--blocks", action="store_true", help="every block, with its whole key")
    listing.add_argument("--tier", choices=("dram", "ssd", "remote"), help="of one tier")
    listing.add_argument(
        "--limit",
        metavar="N",
        type=int,
        default=_LIMIT,
        help=f"at most so many lines; 0: all ({_LIMIT})",
    )
    _add(
        actions,
        "du",
        "sum up blocks and bytes by keyspace, tenant and tier",
        "Of the node that runs, DRAM included; `kvist du` sums up folders of the SSD cache.",
        "kvist cache du --json",
    )


def _add_orders(actions: Any) -> None:
    for name, summary, details, example in (
        (
            "pin",
            "keep blocks in DRAM",
            "Until `unpin` or `clear`, or the node ends. At most half of DRAM can be pinned.",
            "kvist cache pin 3fa2b1c4d5e6",
        ),
        ("unpin", "let pinned blocks go when room is needed", "", "kvist cache unpin 3fa2b1c4d5e6"),
        (
            "evict",
            "forget blocks in every tier",
            "Blocks that are leased or pinned stay. Other prompts that begin with the same blocks "
            "compute them again.",
            "kvist cache evict 3fa2b1c4d5e6",
        ),
    ):
        _add_selection(_add(actions, name, summary, details, example))
    move = _add(
        actions,
        "move",
        "bring blocks up to DRAM, or let DRAM go of them",
        "To ssd: only what is there, or is being written there, leaves DRAM.",
        "kvist cache move 3fa2b1c4d5e6 --to ssd",
    )
    move.add_argument("--to", choices=("dram", "ssd"), required=True, help="where they are to be")
    warm = _add(
        actions,
        "warm",
        "bring blocks up to DRAM before they are asked for",
        "The same as `move --to dram`.",
        "kvist cache warm --all --tenant chat --deadline 30",
    )
    for parser in (move, warm):
        _add_selection(parser)
        parser.add_argument(
            "--deadline",
            metavar="S",
            type=float,
            default=_WARM_S,
            help=f"seconds after which what is not there stays where it is ({_WARM_S:g})",
        )
    clear = _add(
        actions,
        "clear",
        "forget a keyspace, or a tenant's part of it",
        "In every tier, the remote too. Asks first.",
        "kvist cache clear --tenant chat --yes",
    )
    clear.add_argument("--yes", action="store_true", help="do not ask")


def _add(actions: Any, name: str, summary: str, details: str, example: str) -> Any:
    parser = screen.add_command(actions, name, summary=summary, details=details, example=example)
    parser.add_argument(
        "--keyspace", metavar="HEX", default="", help="the model: beginning of its fingerprint"
    )
    parser.add_argument("--tenant", metavar="NAME", help="only this tenant's blocks")
    parser.add_argument("--socket", metavar="PATH", help="the same as --set node.socket=PATH")
    screen.add_config_options(parser)
    screen.add_json_option(parser)
    return parser


def _add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", nargs="*", metavar="KEY", help=_KEY_HELP)
    parser.add_argument("--alone", action="store_true", help="only the named block of each prefix")
    parser.add_argument("--tokens", metavar="FILE", help="a prompt as a JSON list of token ids")
    parser.add_argument("--text", metavar="FILE", help="a prompt as text; needs --model")
    parser.add_argument("--model", metavar="MODEL", help="whose tokenizer reads --text")
    parser.add_argument(
        "--salt", metavar="SALT", default="", help="the cache salt of --tokens or --text"
    )
    parser.add_argument("--all", action="store_true", help="every block, or all of --tenant")


def run(args: argparse.Namespace) -> int:
    """Carries out one action.

    Raises:
        ConfigError: the arguments or the configuration cannot be used.
    """
    from kvist.assemble import node_place
    from kvist.cli.cache import actions
    from kvist.node.cache.client import CacheClient, DeniedError

    if args.socket:
        args.set = [*args.set, f"node.socket={args.socket}"]
    place = node_place(screen.config_from(args).config)
    try:
        with CacheClient(place.socket) as client:
            return actions.ACTIONS[args.action](client, args)
    except ConfigError:
        raise
    except DeniedError as error:
        if error.is_ours:
            raise
        return _failed(error)
    except KvistError as error:
        return _failed(error)


def _failed(error: KvistError) -> int:
    """A failure is no misuse: what was asked makes sense, and may work another time."""
    print(f"kvist: error: {' '.join(str(error).split())}", file=sys.stderr)
    return FAILED
