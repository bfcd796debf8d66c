"""Memory as O_DIRECT wants it: where pages begin, whole pages long."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvist.codec.frame import PAGE_BYTES, padded_bytes


def aligned_buffer(size_bytes: int) -> memoryview:
    """`size_bytes` zeros (at least one page is taken) that begin on a page."""
    return memoryview(mmap.mmap(-1, max(size_bytes, 1)))[:size_bytes]


def is_aligned(buffer: memoryview) -> bool:
    """Whether a contiguous buffer begins on a page."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address % PAGE_BYTES == 0


@dataclass(frozen=True, slots=True)
class PayloadBuffers:
    """Where the pages of one payload are while they move.

    `direct` are bytes of the caller's own buffer, `scratch` the pages of ours that follow:
    none, the last one, or all of them where the caller's buffer does not begin on a page.
    """

    direct: memoryview
    scratch: memoryview

    @classmethod
    def of(cls, data: memoryview) -> PayloadBuffers:
        """Splits a payload's bytes into what can move in place and what cannot."""
        whole = len(data) // PAGE_BYTES * PAGE_BYTES
        if whole and not is_aligned(data):
            whole = 0
        rest = padded_bytes(len(data)) - whole
        return cls(data[:whole], aligned_buffer(rest) if rest else data[:0])

    def fill(self, data: memoryview) -> None:
        """Copies what is not moved in place from `data`, before a write."""
        size = len(data) - len(self.direct)
        if size:
            self.scratch[:size] = data[len(self.direct) :]

    def finish(self, out: memoryview) -> None:
        """Copies what was not moved in place to `out`, after a read."""
        size = len(out) - len(self.direct)
        if size:
            out[len(self.direct) :] = self.scratch[:size]

    def list(self) -> list[memoryview]:
        """What a vectored call takes."""
        return [part for part in (self.direct, self.scratch) if len(part)]


def total_bytes(buffers: Sequence[memoryview]) -> int:
    """Bytes of all `buffers`, which are of bytes."""
    return sum(map(len, buffers))
