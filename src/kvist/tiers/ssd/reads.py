"""The reading side of the SSD tier: frames of many blocks in few I/Os, each proven on arrival.

Frames that stand side by side in a segment are read by one operation up to `MERGE_BYTES`; header
pages go to scratch pages, payloads straight to where the caller wants them. Operations run in the
engine, at most its depth at once; while some are under way the caller's thread proves those that
have ended.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from kvist.codec.frame import PAGE_BYTES, RAW_CODEC, FrameHeader
from kvist.codec.registry import CodecRegistry
from kvist.core.errors import FormatError, TierError, VersionError
from kvist.native import checksum
from kvist.tiers.ssd.buffers import PayloadBuffers, aligned_buffer, total_bytes
from kvist.tiers.ssd.engine import IoEngine
from kvist.tiers.ssd.index import Place
from kvist.tiers.ssd.io import IOV_MAX, SegmentFile, after, tier_error

MERGE_BYTES = 1 << 20
_BUFFERS_A_FRAME = 3  # header, payload in place, rest of the payload


class MissCause(Enum):
    """Why a read was a miss. All but the first two drop the entry."""

    ABSENT = "absent"
    SIZE = "size"  # the caller's buffer has another size than the block
    SHORT = "short"  # the file ends within the frame
    HEADER = "header"  # the header is damaged
    VERSION = "version"  # the header is of a newer version
    IDENTITY = "identity"  # a valid header of another block
    PAYLOAD = "payload"  # the payload's checksum does not match
    CODEC = "codec"  # encoded in a way that this tier does not decode, or not what its codec makes


# What became of one frame: the bytes are there (`None`), a miss, or a failure of the medium.
ReadResult = MissCause | TierError | None


@dataclass(frozen=True, slots=True)
class WantedFrame:
    """One block to be read; `out` has its raw size, `index` is the caller's name for it."""

    index: int
    place: Place
    file: SegmentFile
    out: memoryview


class _FrameBuffers:
    """Where the bytes of one frame go while it is read."""

    def __init__(self, wanted: WantedFrame, page: memoryview) -> None:
        self.wanted = wanted
        self._page = page
        place = wanted.place
        encoded = place.stored_bytes != place.raw_bytes
        self._stored = aligned_buffer(place.stored_bytes) if encoded else wanted.out
        self._payload = PayloadBuffers.of(self._stored)

    def list(self) -> list[memoryview]:
        return [self._page, *self._payload.list()]

    def prove(self, available_bytes: int, codecs: CodecRegistry) -> MissCause | None:
        """Checks what arrived, of which `available_bytes` are valid, and decodes it."""
        place = self.wanted.place
        if available_bytes < PAGE_BYTES + place.stored_bytes:
            return MissCause.SHORT
        try:
            header = FrameHeader.unpack(self._page)
        except VersionError:
            return MissCause.VERSION
        except FormatError:
            return MissCause.HEADER
        if not place.agrees(header):
            return MissCause.IDENTITY
        self._payload.finish(self._stored)
        if checksum(self._stored) != header.payload_checksum:
            return MissCause.PAYLOAD
        return self._decode(header, codecs)

    def _decode(self, header: FrameHeader, codecs: CodecRegistry) -> MissCause | None:
        out = self.wanted.out
        if header.codec == RAW_CODEC:
            right = self._stored is out and codecs.takes_raw
            return None if right else MissCause.CODEC
        chain = codecs.find(header.codec)
        if chain is None:
            return MissCause.CODEC
        stored = memoryview(bytes(out)) if self._stored is out else self._stored
        try:
            chain.decode(stored, out, key=self.wanted.place.key)
        except FormatError:
            return MissCause.CODEC
        return None


class _Operation:
    """Frames that stand side by side in one file, read by one call."""

    def __init__(self, frames: Sequence[WantedFrame]) -> None:
        pages = aligned_buffer(len(frames) * PAGE_BYTES)
        self._frames = [
            _FrameBuffers(frame, pages[i * PAGE_BYTES :][:PAGE_BYTES])
            for i, frame in enumerate(frames)
        ]
        self.file = frames[0].file
        self.offset = frames[0].place.offset
        self.buffers = [part for frame in self._frames for part in frame.list()]

    def settle(self, result: int, codecs: CodecRegistry) -> Iterator[tuple[int, ReadResult]]:
        """What became of each frame, `result` being bytes read or -errno."""
        try:
            total = self._complete(result)
        except TierError as error:
            for frame in self._frames:
                yield frame.wanted.index, error
            return
        for frame in self._frames:
            available = total - (frame.wanted.place.offset - self.offset)
            yield frame.wanted.index, frame.prove(available, codecs)

    def _complete(self, result: int) -> int:
        """Reads what one call did not; returns how many bytes are there."""
        if result < 0 and result != -errno.EINVAL:
            failure = OSError(-result, os.strerror(-result))
            raise tier_error(failure, f"read {self.file.path}")
        done = max(0, result)
        if done < total_bytes(self.buffers):
            done += self.file.read_at(after(self.buffers, done), self.offset + done)
        return done


def _merged(frames: Sequence[WantedFrame]) -> list[_Operation]:
    """Operations for `frames`, which stay in the order of their first frame as it was asked for."""
    runs: list[list[WantedFrame]] = []
    size = 0
    for frame in sorted(frames, key=lambda f: (f.place.segment, f.place.offset)):
        frame_size = frame.place.end - frame.place.offset
        last = runs[-1][-1].place if runs else None
        joins = (
            last is not None
            and (last.segment, last.end) == (frame.place.segment, frame.place.offset)
            and size + frame_size <= MERGE_BYTES
            and (len(runs[-1]) + 1) * _BUFFERS_A_FRAME <= IOV_MAX
        )
        if joins:
            runs[-1].append(frame)
            size += frame_size
        else:
            runs.append([frame])
            size = frame_size
    runs.sort(key=lambda run: min(frame.index for frame in run))
    return [_Operation(run) for run in runs]


class FrameReader:
    """Reads and proves frames. Thread-safe; the caller pins the files meanwhile."""

    def __init__(self, engine: IoEngine, codecs: CodecRegistry) -> None:
        self._engine = engine
        self._codecs = codecs

    def read_one(self, frame: WantedFrame) -> MissCause | None:
        """Reads one frame in the calling thread.

        Raises:
            TierError: the medium failed.
        """
        for _, result in _Operation([frame]).settle(0, self._codecs):
            if isinstance(result, TierError):
                raise result
            return result
        raise AssertionError("an operation has a frame")

    def read(self, frames: Sequence[WantedFrame]) -> Iterator[tuple[int, ReadResult]]:
        """Reads frames; yields each index once, as it is decided."""
        operations = _merged(frames)
        try:
            batch = self._engine.submit(
                [(False, o.file.fd, o.offset, o.buffers) for o in operations]
            )
        except OSError as exc:  # no ring, no thread: one by one
            for operation in operations:
                yield from operation.settle(0, self._codecs)
            del exc
            return
        try:
            while (done := batch.next()) is not None:
                yield from operations[done[0]].settle(done[1], self._codecs)
        finally:
            batch.close()
