"""Disk: Kvist's SSD tier, and raw O_DIRECT calls on the same folder as the limit.

Both write the same blocks in batches with one fdatasync each, into space that was reserved, and
read them past the page cache.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from pathlib import Path

from kvist.bench.store.contender import Blocks, ContenderError, round_keys, share_out
from kvist.core.errors import KvistError
from kvist.core.outcome import Outcome
from kvist.tiers.protocol import Payload
from kvist.tiers.ssd import SsdTier

BATCH_BLOCKS = 32  # as the store's writer
READ_BATCH_BLOCKS = 32  # as the store's loader
_CAPACITY_BYTES = 4 << 30  # never reached: it decides how long a segment is
_KEYSPACE = bytes(32)
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE


class RawDisk:
    """The limit: pwrite and pread with O_DIRECT of whole blocks."""

    def __init__(self, blocks: Blocks, folder: Path, *, write_depth: int, read_depth: int) -> None:
        self._blocks, self._path = blocks, folder / "raw"
        self._write_depth, self._read_depth = write_depth, read_depth

    def write(self, round_number: int) -> float:
        """Writes a new file of all blocks; seconds."""
        del round_number
        self._path.unlink(missing_ok=True)
        blocks = self._blocks
        began = time.perf_counter()
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            ctypes.CDLL(None).fallocate(
                fd, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(blocks.total_bytes)
            )
            for first in range(0, blocks.count, BATCH_BLOCKS):

                def put(i: int, first: int = first) -> None:
                    _whole(os.pwrite(fd, blocks.view(first + i), self._offset(first + i)), blocks)

                share_out(self._write_depth, min(BATCH_BLOCKS, blocks.count - first), put)
                os.fdatasync(fd)
            return time.perf_counter() - began
        finally:
            os.close(fd)

    def read(self, round_number: int) -> float:
        """Reads it back; seconds."""
        del round_number
        blocks = self._blocks
        blocks.forget()
        began = time.perf_counter()
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        try:

            def get(i: int) -> None:
                _whole(os.preadv(fd, [blocks.room(i)], self._offset(i)), blocks)

            share_out(self._read_depth, blocks.count, get)
            took_s = time.perf_counter() - began
        finally:
            os.close(fd)
        self._path.unlink()
        blocks.prove("the disk")
        return took_s

    def _offset(self, i: int) -> int:
        return i * self._blocks.block_bytes

    def close(self) -> None:
        """Deletes the file."""
        self._path.unlink(missing_ok=True)


def _whole(done_bytes: int, blocks: Blocks) -> None:
    if done_bytes != blocks.block_bytes:
        raise ContenderError(f"the disk moved {done_bytes} of {blocks.block_bytes} bytes")


class KvistDisk:
    """The SSD tier as the store uses it: batches of puts; two threads that read."""

    def __init__(self, blocks: Blocks, folder: Path, *, threads: int) -> None:
        self._blocks, self._folder, self._threads = blocks, folder / "kvist", threads
        self._tier: SsdTier | None = None

    def write(self, round_number: int) -> float:
        """Puts all blocks in an empty tier; seconds."""
        self.close()
        tier = self._tier = SsdTier.open(
            self._folder, keyspace=_KEYSPACE, capacity_bytes=_CAPACITY_BYTES
        )
        keys = round_keys(round_number, self._blocks.count)
        parents = [None, *keys[:-1]]
        payloads = [
            Payload(key, parent, self._blocks.view(i))
            for i, (key, parent) in enumerate(zip(keys, parents, strict=True))
        ]
        began = time.perf_counter()
        for i in range(0, len(payloads), BATCH_BLOCKS):
            tier.put(payloads[i : i + BATCH_BLOCKS])
        return time.perf_counter() - began

    def read(self, round_number: int) -> float:
        """Reads and proves all blocks; seconds."""
        tier = self._tier
        if tier is None:
            raise ContenderError("Kvist was not written to")
        keys = round_keys(round_number, self._blocks.count)
        blocks = self._blocks
        blocks.forget()
        batches = range(0, blocks.count, READ_BATCH_BLOCKS)

        def get(batch: int) -> None:
            run = range(batches[batch], min(batches[batch] + READ_BATCH_BLOCKS, blocks.count))
            for _, outcome in tier.read_many([(keys[i], blocks.room(i)) for i in run]):
                if outcome is not Outcome.HIT:
                    raise ContenderError(f"Kvist read a block as {outcome}")

        began = time.perf_counter()
        share_out(self._threads, len(batches), get)
        took_s = time.perf_counter() - began
        blocks.prove("Kvist")
        self.close()
        return took_s

    def close(self) -> None:
        """Closes the tier and deletes its folder."""
        tier, self._tier = self._tier, None
        if tier is not None:
            try:
                tier.close()
            except KvistError as error:
                raise ContenderError(str(error)) from error
        shutil.rmtree(self._folder, ignore_errors=True)


def medium_of(folder: Path) -> str:
    """Type of the file system that holds `folder`."""
    path, best = str(folder.resolve()), ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind = line.split()[:3]
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]
