"""Plain files as a peer: one file a block, in a folder in memory or on the disk."""

from __future__ import annotations

import os
import shutil
import time
from functools import partial
from pathlib import Path

from kvist.bench.store.contender import Blocks, ContenderError, share_out
from kvist.bench.store.disk import BATCH_BLOCKS


class PlainFiles:
    """Written and read through the page cache by several threads."""

    def __init__(self, blocks: Blocks, folder: Path, *, threads: int) -> None:
        self._blocks, self._folder, self._threads = blocks, folder / "files", threads

    def write(self, round_number: int) -> float:
        """Writes a new file for every block; seconds."""
        del round_number
        self.close()
        self._folder.mkdir()
        began = time.perf_counter()
        for first in range(0, self._blocks.count, BATCH_BLOCKS):
            batch = range(first, min(first + BATCH_BLOCKS, self._blocks.count))
            share_out(self._threads, len(batch), partial(self._put, first))
            self._keep(batch)
        return time.perf_counter() - began

    def _put(self, first: int, nth: int) -> None:
        i = first + nth
        fd = os.open(self._folder / str(i), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            if os.write(fd, self._blocks.view(i)) != self._blocks.block_bytes:
                raise ContenderError("a file was not written whole")
        finally:
            os.close(fd)

    def _keep(self, batch: range) -> None:
        """In memory there is nothing to be made durable."""

    def read(self, round_number: int) -> float:
        """Reads every file; seconds."""
        del round_number
        self._blocks.forget()
        self._before_read()
        began = time.perf_counter()
        share_out(self._threads, self._blocks.count, self._get)
        took_s = time.perf_counter() - began
        self._blocks.prove("a file")
        self.close()
        return took_s

    def _get(self, i: int) -> None:
        fd = os.open(self._folder / str(i), os.O_RDONLY)
        try:
            if os.readv(fd, [self._blocks.room(i)]) != self._blocks.block_bytes:
                raise ContenderError("a file was not read whole")
        finally:
            os.close(fd)

    def _before_read(self) -> None:
        """In memory they are and stay."""

    def close(self) -> None:
        """Deletes the files."""
        shutil.rmtree(self._folder, ignore_errors=True)


class DurableFiles(PlainFiles):
    """On a disk: each batch is made durable, and reads find nothing in the page cache."""

    def _keep(self, batch: range) -> None:
        for path in [*(self._folder / str(i) for i in batch), self._folder]:
            sync(path)

    def _before_read(self) -> None:
        drop_cached(self._folder)


def sync(path: Path) -> None:
    """Makes a file, or a folder's names, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def drop_cached(folder: Path) -> None:
    """Makes the kernel forget what it holds of the files in and below `folder`."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
