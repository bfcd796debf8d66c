"""What each action of `kvist cache` asks, and prints."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Literal

import msgspec

from kvist.cli import screen
from kvist.cli.cache.selection import Batch, checked_digits, selected
from kvist.core.errors import ConfigError
from kvist.node.cache import messages as m
from kvist.node.cache.client import CacheClient

_SHORT = 12
_MOVE_KEYS = 64  # in one request, so that the bar moves
_STEP_S = 5.0  # of one request of those
_UNKNOWN = "-"
_RUNS = ("key", "blocks", "bytes", "tier", "tenant", "pinned", "leased", "age")
_BLOCKS = ("key", "bytes", "tier", "tenant", "state", "pinned", "leased", "age")
_NUMBERS = frozenset({"blocks", "bytes", "pinned", "leased", "age"})


def list_blocks(client: CacheClient, args: argparse.Namespace) -> int:
    """`ls`."""
    if args.limit < 0:
        raise ConfigError(f"cannot be {args.limit}", path="--limit", remedy="0 is all")
    single = args.blocks or args.key is not None
    ask: m.ListBlocks | m.ListRuns = m.ListRuns(
        keyspace=args.keyspace, tenant=args.tenant, tier=args.tier
    )
    if single:
        ending = checked_digits(args.key) if args.key is not None else ""
        ask = m.ListBlocks(
            keyspace=args.keyspace, tenant=args.tenant, tier=args.tier, ending=ending
        )
    most = args.limit or None
    ask = msgspec.structs.replace(ask, limit=min(most or m.MOST_ITEMS, m.MOST_ITEMS))
    items = islice(_items(client, ask), most)
    if args.json:
        for item in items:  # a line each: a list may be long
            print(msgspec.json.encode(item).decode())
        return 0
    names = _BLOCKS if single else _RUNS
    shown = 0
    while rows := list(islice(items, m.MOST_ITEMS)):
        grid = screen.table(*names, right=_NUMBERS)
        for item in rows:
            grid.add_row(*(_block_row(item) if isinstance(item, m.ShownBlock) else _run_row(item)))
        screen.console().print(grid)
        shown += len(rows)
    if most and shown == most:
        print(f"the first {most}; --limit 0 shows all", file=sys.stderr)
    return 0


def _items(
    client: CacheClient, ask: m.ListBlocks | m.ListRuns
) -> Iterator[m.ShownBlock | m.ShownRun]:
    while True:
        if isinstance(ask, m.ListBlocks):
            blocks = client.ask(ask, m.BlockPage)
            yield from blocks.blocks
            cursor = blocks.cursor
        else:
            runs = client.ask(ask, m.RunPage)
            yield from runs.runs
            cursor = runs.cursor
        if not cursor:
            return
        ask = msgspec.structs.replace(ask, cursor=cursor)


def _run_row(run: m.ShownRun) -> tuple[str, ...]:
    return (
        run.last[:_SHORT],
        f"{run.blocks:,}",
        screen.format_bytes(run.size_bytes),
        run.tier,
        _tenant(run.tenant),
        f"{run.pinned_blocks:,}",
        f"{run.leased_blocks:,}",
        _age(run.age_s),
    )


def _block_row(block: m.ShownBlock) -> tuple[str, ...]:
    return (
        block.key,
        screen.format_bytes(block.size_bytes),
        block.tier,
        _tenant(block.tenant),
        block.state,
        "yes" if block.pinned else "",
        "yes" if block.leased else "",
        _age(block.age_s),
    )


def _tenant(tenant: str | None) -> str:
    return _UNKNOWN if tenant is None else tenant or repr(tenant)


def _age(age_s: float | None) -> str:
    if age_s is None:
        return _UNKNOWN
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"


def sum_up(client: CacheClient, args: argparse.Namespace) -> int:
    """`du`."""
    found = client.ask(m.ShowKeyspaces(), m.Keyspaces).keyspaces
    meant = [k for k in found if k.fingerprint.startswith(args.keyspace)]
    if not meant and args.keyspace:
        raise ConfigError(
            "no such keyspace is open", path="--keyspace", remedy="see `kvist cache du`"
        )
    sums = [
        client.ask(m.ShowUsage(keyspace=k.fingerprint, tenant=args.tenant), m.Usage) for k in meant
    ]
    if args.json:
        screen.print_json([msgspec.to_builtins(each) for each in sums])
        return 0
    names = ("keyspace", "tier", "tenant", "blocks", "bytes", "pinned")
    grid = screen.table(*names, right=_NUMBERS)
    for each in sums:
        for row in each.usage:
            grid.add_row(
                each.keyspace[:_SHORT],
                row.tier,
                _tenant(row.tenant),
                f"{row.blocks:,}",
                screen.format_bytes(row.size_bytes),
                f"{row.pinned_blocks:,}",
            )
    screen.console().print(grid)
    for each in sums:
        if each.omitted:
            print(f"{each.keyspace[:_SHORT]}: {each.omitted:,} smaller tenants are left out")
    return 0


def pin(client: CacheClient, args: argparse.Namespace) -> int:
    """`pin`."""
    total = _each(client, args, m.PinBlocks)
    return _report(args, total, "pinned", "are not in DRAM: `kvist cache warm` brings them")


def unpin(client: CacheClient, args: argparse.Namespace) -> int:
    """`unpin`."""
    return _report(args, _each(client, args, m.UnpinBlocks), "unpinned", "are left")


def evict(client: CacheClient, args: argparse.Namespace) -> int:
    """`evict`."""
    total = _each(client, args, m.EvictBlocks)
    return _report(args, total, "evicted", "are leased, pinned, moving or absent, and stay")


def _each(
    client: CacheClient,
    args: argparse.Namespace,
    order: type[m.PinBlocks | m.UnpinBlocks | m.EvictBlocks],
) -> m.Changed:
    total = m.Changed(0, 0, 0)
    for tier in _tiers(args, "dram", "ssd") if order is m.EvictBlocks else _tiers(args, "dram"):
        for batch in selected(client, args, tier):
            for keys in _distinct(batch, m.MOST_KEYS):
                ask = order(
                    keyspace=args.keyspace, tenant=args.tenant, keys=tuple(key for key, _ in keys)
                )
                reply = client.ask(ask, m.Changed)
                if tier == "ssd":  # what is held was counted in DRAM
                    reply = msgspec.structs.replace(reply, left=0)
                total = _plus(total, reply)
    return total


def _tiers(args: argparse.Namespace, *tiers: m.Place) -> tuple[m.Place | None, ...]:
    """Where `--all` looks; what is named is looked for everywhere."""
    return tiers if args.all else (None,)


def move(client: CacheClient, args: argparse.Namespace) -> int:
    """`move` and `warm`."""
    if args.deadline <= 0:
        raise ConfigError(f"cannot be {args.deadline:g}", path="--deadline", remedy="above 0")
    to: Literal["dram", "ssd"] = "dram" if args.action == "warm" else args.to
    until, total = time.monotonic() + args.deadline, m.Changed(0, 0, 0)
    with screen.progress_bars() as bars:
        task = bars.add_task(args.action, total=None)
        seen = 0
        (tier,) = _tiers(args, "ssd" if to == "dram" else "dram")
        for batch in selected(client, args, tier):
            seen += len(batch)
            bars.update(task, total=seen)
            for keys in _distinct(batch, _MOVE_KEYS):
                left = until - time.monotonic()
                if left <= 0:
                    total = _plus(total, m.Changed(0, 0, len(keys)))
                    continue
                ask = m.MoveBlocks(
                    keyspace=args.keyspace,
                    tenant=args.tenant,
                    keys=tuple(key for key, _ in keys),
                    parents=tuple(parent for _, parent in keys),
                    to=to,
                    deadline_s=min(left, _STEP_S),
                )
                total = _plus(total, client.ask(ask, m.Changed))
                bars.advance(task, len(keys))
    why = {"dram": "could not be brought", "ssd": "are leased, pinned, or not below, and stay"}
    return _report(args, total, f"moved to {to}", why[to])


def clear(client: CacheClient, args: argparse.Namespace) -> int:
    """`clear`."""
    whose = f"all blocks of tenant {args.tenant!r}" if args.tenant is not None else "all blocks"
    if not args.yes:
        if not sys.stdin.isatty():
            raise ConfigError("nobody is here to be asked", path="--yes", remedy="add --yes")
        print(f"forget {whose} in every tier? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("kvist: nothing was done", file=sys.stderr)
            return 1
    gone, goes_on = 0, True
    while goes_on:  # a step that forgot nothing is the last: what is held may be held for long
        reply = client.ask(m.ClearBlocks(keyspace=args.keyspace, tenant=args.tenant), m.Cleared)
        gone, goes_on = gone + reply.blocks, reply.blocks > 0 and not reply.complete
    left = 0 if args.tenant is None else _left(client, args)
    if args.json:
        screen.print_json({"blocks": gone})
    else:
        print(f"cleared {gone:,} blocks")
    if left:
        why = "are leased, pinned, moving or new, and stay"
        print(f"kvist: {left:,} blocks {why}", file=sys.stderr)
    return int(left > 0)


def _left(client: CacheClient, args: argparse.Namespace) -> int:
    """Blocks of the tenant that are still there; one that is in two tiers is one."""
    ask = m.ShowUsage(keyspace=args.keyspace, tenant=args.tenant)
    return max((row.blocks for row in client.ask(ask, m.Usage).usage), default=0)


def _distinct(batch: Batch, most: int) -> Iterator[Batch]:
    """Parts of a batch; a block that is in two tiers is in it once."""
    once = list({key: (key, parent) for key, parent in reversed(batch)}.values())[::-1]
    for start in range(0, len(once), most):
        yield once[start : start + most]


def _plus(a: m.Changed, b: m.Changed) -> m.Changed:
    return m.Changed(a.changed + b.changed, a.present + b.present, a.left + b.left)


def _report(args: argparse.Namespace, total: m.Changed, done: str, left: str) -> int:
    """1 if something could not be done."""
    if args.json:
        found = {"changed": total.changed, "present": total.present, "left": total.left}
        screen.print_json(found)
        return int(total.left > 0)
    already = f", {total.present:,} were so already" if total.present else ""
    print(f"{done}: {total.changed:,} blocks{already}")
    if total.left:
        print(f"kvist: {total.left:,} blocks {left}", file=sys.stderr)
    return int(total.left > 0)


ACTIONS: dict[str, Callable[[CacheClient, argparse.Namespace], int]] = {
    "ls": list_blocks,
    "du": sum_up,
    "pin": pin,
    "unpin": unpin,
    "evict": evict,
    "move": move,
    "warm": move,
    "clear": clear,
}
