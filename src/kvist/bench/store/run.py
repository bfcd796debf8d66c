"""Runs the store benchmark: every round asks each contender in turn, in an order drawn anew.

Three stages: memory, disk, look-ups. Whatever is compared was measured in the same round, on the
same blocks. The first time round is not kept: it faults pages in and opens connections.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvist.bench.runner import Screen
from kvist.bench.store.contender import Blocks, Contender, ContenderError
from kvist.bench.store.disk import KvistDisk, RawDisk
from kvist.bench.store.driven import Driven, find_peer
from kvist.bench.store.files import DurableFiles, PlainFiles
from kvist.bench.store.lookup import Lookups
from kvist.bench.store.memory import Checksums, KvistMemory, Memcpy, Order
from kvist.bench.store.redis import Redis
from kvist.bench.store.samples import (
    FILES,
    KVIST,
    LIMIT,
    LMCACHE,
    MOONCAKE,
    REDIS,
    Row,
    StoreResult,
)

DRAM, DISK = "dram", "disk"
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender and the rows that its values go to."""

    who: str
    write: Row
    read: Row
    contender: Contender


class StoreRun:
    """One run; fills `result`."""

    def __init__(
        self, result: StoreResult, folder: Path, screen: Screen, *, peers: bool, seed: int
    ) -> None:
        """`folder` is on the disk that is measured. `peers`: also those that need a package."""
        self._result, self._folder, self._screen = result, folder, screen
        self._peers, self._seed = peers, seed

    def steps(self) -> int:
        """How many there will be, if no contender fails."""
        peers = 4 if self._peers else 1
        return (self._result.settings.rounds + 1) * (2 * (5 + peers) + 2 * (2 + peers) + 1)

    def run(self) -> None:
        """Measures.

        Raises:
            ContenderError: Kvist or a limit failed; a peer that fails is left out from then on.
        """
        wanted = self._result.settings
        with _memory_folder(self._folder) as memory:
            with Blocks(
                count=wanted.dram_blocks, block_bytes=wanted.block_bytes, seed=self._seed
            ) as blocks:
                self._stage(lambda stack: self._in_memory(stack, blocks, memory))
            with Blocks(
                count=wanted.disk_blocks, block_bytes=wanted.block_bytes, seed=self._seed
            ) as blocks:
                self._stage(lambda stack: self._on_disk(stack, blocks))
        self._look_up()

    def _in_memory(self, stack: ExitStack, blocks: Blocks, memory: Path) -> list[Entry]:
        threads = self._result.settings.threads
        add = _Adder(stack, self._result, DRAM)
        row = (Row.DRAM_WRITE, Row.DRAM_READ)
        add(LIMIT, *row, lambda: Memcpy(blocks, threads=threads))
        for order, checksums, rows in (
            (Order.HEADS_APART, Checksums.NONE, row),
            (Order.HEADS_APART, Checksums.TAKEN, (Row.DRAM_WRITE_SUMMED, Row.DRAM_READ_SUMMED)),
            (Order.TOKENS_APART, Checksums.NONE, (Row.TOKENS_APART_WRITE, Row.TOKENS_APART_READ)),
            (Order.TRANSPOSED, Checksums.NONE, (Row.TRANSPOSED_WRITE, Row.TRANSPOSED_READ)),
        ):
            add(KVIST, *rows, partial(KvistMemory, blocks, order, checksums, threads=threads))
        add(FILES, *row, lambda: PlainFiles(blocks, memory, threads=threads))
        self._add_peers(add, row, blocks, memory, durable=False)
        return add.entries

    def _on_disk(self, stack: ExitStack, blocks: Blocks) -> list[Entry]:
        wanted = self._result.settings
        add = _Adder(stack, self._result, DISK)
        row = (Row.DISK_WRITE, Row.DISK_READ)
        depths = {"write_depth": wanted.write_depth, "read_depth": wanted.read_depth}
        add(LIMIT, *row, lambda: RawDisk(blocks, self._folder, **depths))
        add(KVIST, *row, lambda: KvistDisk(blocks, self._folder, threads=wanted.threads))
        add(FILES, *row, lambda: DurableFiles(blocks, self._folder, threads=wanted.threads))
        self._add_peers(add, row, blocks, self._folder, durable=True)
        return add.entries

    def _add_peers(
        self, add: _Adder, row: tuple[Row, Row], blocks: Blocks, folder: Path, *, durable: bool
    ) -> None:
        if not self._peers:
            for who in (REDIS, LMCACHE, MOONCAKE):
                add.without(who, "not asked for (--peers)")
            return
        threads = self._result.settings.threads
        add(REDIS, *row, lambda: Redis(blocks, folder, threads=threads, durable=durable))
        medium = DISK if durable else DRAM
        for who in (LMCACHE, MOONCAKE):
            add(who, *row, partial(_driven, who, blocks, folder, medium))

    def _stage(self, make: Callable[[ExitStack], list[Entry]]) -> None:
        with ExitStack() as stack:
            entries = make(stack)
            for turn in range(self._result.settings.rounds + 1):
                for entry in in_turn(entries, turn):
                    if not self._measure(entry, turn):
                        entries = [e for e in entries if e is not entry]

    def _measure(self, entry: Entry, turn: int) -> bool:
        """Whether the contender is to be asked again."""
        result = self._result
        is_disk = entry.write is Row.DISK_WRITE
        wanted = result.settings
        blocks = wanted.disk_blocks if is_disk else wanted.dram_blocks
        total_bytes = blocks * wanted.block_bytes
        try:
            for row, call in (
                (entry.write, entry.contender.write),
                (entry.read, entry.contender.read),
            ):
                self._screen.step(f"{entry.who} {row.value}")
                took_s = call(turn)
                if turn and took_s is not None:
                    result.add(row, entry.who, turn - 1, total_bytes / took_s)
        except ContenderError as error:
            if entry.who in (KVIST, LIMIT):
                raise
            result.absent[absent_key(entry.who, DISK if is_disk else DRAM)] = str(error)
            return False
        return True

    def _look_up(self) -> None:
        wanted = self._result.settings
        self._screen.say(f"writing a log of {wanted.indexed_blocks} blocks")
        lookups = Lookups(
            self._folder,
            indexed_blocks=wanted.indexed_blocks,
            match_keys=wanted.match_keys,
            block_bytes=wanted.block_bytes,
        )
        try:
            for turn in range(wanted.rounds + 1):
                self._screen.step("look-ups")
                opened_s, index_bytes, match_s = lookups.measure()
                if turn:
                    self._result.add(Row.OPEN, KVIST, turn - 1, opened_s)
                    self._result.add(Row.INDEX, KVIST, turn - 1, index_bytes)
                    self._result.add(Row.MATCH, KVIST, turn - 1, match_s)
        finally:
            lookups.close()


class _Adder:
    """Makes contenders and sees to their end; notes why one cannot be had."""

    def __init__(self, stack: ExitStack, result: StoreResult, medium: str) -> None:
        self.entries: list[Entry] = []
        self._stack, self._result, self._medium = stack, result, medium

    def __call__(self, who: str, write: Row, read: Row, make: Callable[[], Contender]) -> None:
        try:
            contender = make()
        except ContenderError as error:
            if who in (KVIST, LIMIT):
                raise
            self.without(who, str(error))
            return
        self._stack.callback(contender.close)
        self.entries.append(Entry(who, write, read, contender))

    def without(self, who: str, why: str) -> None:
        """Notes that a peer is not measured."""
        self._result.absent[absent_key(who, self._medium)] = why


def _driven(who: str, blocks: Blocks, folder: Path, medium: str) -> Driven:
    return Driven(find_peer(who), blocks, folder, medium=medium)


def absent_key(who: str, medium: str) -> str:
    """Name of a peer on a medium in `StoreResult.absent`."""
    return f"{who} {medium}"


def in_turn(entries: Sequence[Entry], turn: int) -> list[Entry]:
    """`entries` in another order every turn: what one leaves in the caches meets others in turn."""
    order = list(entries)
    random.Random(turn).shuffle(order)
    return order


@contextmanager
def _memory_folder(otherwise: Path) -> Iterator[Path]:
    """A folder that is memory where the system has one."""
    with tempfile.TemporaryDirectory(
        prefix="kvist-bench-", dir=_MEMORY if _MEMORY.is_dir() else otherwise
    ) as name:
        yield Path(name)
