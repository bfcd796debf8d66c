"""Look-ups: matching a long prompt, memory of the index, and opening a large log.

The log of a million blocks is made of sealed segments whose frames are holes: opening after a clean
close reads headers and footers only, and a million real blocks would be two terabytes.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvist.bench.store.contender import ContenderError, round_keys
from kvist.codec.frame import PAGE_BYTES, FrameKind
from kvist.core.keys import KEY_BYTES, Key
from kvist.policy import LeafLru
from kvist.store import TieredStore
from kvist.tiers.dram import Arena
from kvist.tiers.ssd import SsdTier
from kvist.tiers.ssd.segment import Record, pack_header, pack_tail, segment_name

_KEYSPACE = bytes(KEY_BYTES)
_SEGMENT_BLOCKS = 4096
_CAPACITY_BYTES = 64 << 40


def write_log(folder: Path, keys: list[Key], *, block_bytes: int) -> None:
    """A tier's folder as a clean close leaves it, but for the frames, which are holes."""
    folder.mkdir(parents=True)
    sequence = 1
    for number, first in enumerate(range(0, len(keys), _SEGMENT_BLOCKS), 1):
        records: list[Record] = []
        end = PAGE_BYTES
        for i in range(first, min(first + _SEGMENT_BLOCKS, len(keys))):
            record = Record(
                kind=FrameKind.BLOCK,
                key=keys[i],
                parent=keys[i - 1] if i else None,
                keyspace=_KEYSPACE,
                segment=number,
                offset=end,
                raw_bytes=block_bytes,
                stored_bytes=block_bytes,
                sequence=sequence,
            )
            records.append(record)
            end, sequence = record.end, sequence + 1
        with (folder / segment_name(number)).open("wb") as file:
            file.write(pack_header(number))
            file.seek(end)
            file.write(pack_tail(records, segment=number, footer_offset=end))


def random_keys(count: int, *, seed: int) -> list[Key]:
    """Distinct keys."""
    raw = np.random.default_rng(seed).bytes(count * KEY_BYTES)
    return [raw[i : i + KEY_BYTES] for i in range(0, len(raw), KEY_BYTES)]


class Lookups:
    """One log and one prompt, measured again every round."""

    def __init__(self, folder: Path, *, indexed_blocks: int, match_keys: int, block_bytes: int):
        self._folder = folder / "log"
        self._blocks, self._block_bytes = indexed_blocks, block_bytes
        self.prompt = round_keys(0, match_keys)
        others = random_keys(indexed_blocks - match_keys, seed=1)
        write_log(self._folder, [*self.prompt, *others], block_bytes=block_bytes)

    def measure(self, *, prompt_repeats: int = 5) -> tuple[float, float, float]:
        """Seconds to open, index bytes a block, and seconds to match the prompt.

        Every segment's header and footer are read from the page cache, as after a restart of the
        process. The match is the median of a few.

        Raises:
            ContenderError: the log did not open as it should.
        """
        gc.collect()
        began = time.perf_counter()
        tier = SsdTier.open(self._folder, keyspace=_KEYSPACE, capacity_bytes=_CAPACITY_BYTES)
        opened_s = time.perf_counter() - began
        arena = Arena(1 << 20, slot_bytes=1 << 20)
        store = TieredStore(arena, LeafLru(), tier, raw_bytes=1 << 20)
        try:
            stats = tier.stats()
            if stats.blocks != self._blocks:
                raise ContenderError(f"{stats.blocks} of {self._blocks} blocks were found")
            times = list(self._match_times(store, prompt_repeats))
        finally:
            store.close()
        return opened_s, stats.index_bytes / stats.blocks, sorted(times)[len(times) // 2]

    def _match_times(self, store: TieredStore, repeats: int) -> Iterator[float]:
        for _ in range(repeats):
            began = time.perf_counter()
            found = store.match(self.prompt)
            yield time.perf_counter() - began
            if len(found) != len(self.prompt):
                raise ContenderError(f"{len(found)} of {len(self.prompt)} keys were matched")

    def close(self) -> None:
        """Deletes the log."""
        shutil.rmtree(self._folder, ignore_errors=True)
