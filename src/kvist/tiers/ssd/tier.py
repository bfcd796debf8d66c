"""The SSD tier: `LowerTier` over a segment log, its index and the lock of its directory."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvist.codec.frame import PAGE_BYTES
from kvist.codec.registry import CodecRegistry
from kvist.core.errors import ClosedError, ConfigError, TierError
from kvist.core.keys import KEY_BYTES, Key
from kvist.core.outcome import Outcome
from kvist.tiers.encoding import block_header, encoded, tombstone_header
from kvist.tiers.protocol import ListedBlock, Payload, Space
from kvist.tiers.ssd.contents import list_blocks
from kvist.tiers.ssd.engine import DEFAULT_DEPTH, EngineKind, IoEngine, open_engines
from kvist.tiers.ssd.index import BlockIndex, Place
from kvist.tiers.ssd.io import FsyncMode, IoMode, PosixIo, SegmentIo, held
from kvist.tiers.ssd.lock import LOCK_BYTES, DirectoryLock
from kvist.tiers.ssd.log import SegmentLog
from kvist.tiers.ssd.opening import Found, recover
from kvist.tiers.ssd.reads import FrameReader, MissCause, WantedFrame
from kvist.tiers.ssd.recovery import Progress, VerifyReport, scan_directory
from kvist.tiers.ssd.segment import tail_bytes
from kvist.tiers.ssd.segments import LogLimits

DEFAULT_SEGMENT_BYTES = 256 << 20
MIN_CAPACITY_BYTES = LOCK_BYTES + PAGE_BYTES + 2 * PAGE_BYTES + tail_bytes(1)  # one small frame
_NOTHING = memoryview(b"")
_SHARES = (8, 256)  # a segment is at most 1/8 and at least 1/256 of the capacity


@dataclass(frozen=True, slots=True)
class SsdStats:
    """Counters since open, and what is there now.

    The blocks that were put had `raw_bytes` and took `stored_bytes` encoded, frames aside.
    """

    blocks: int
    bytes_used: int
    capacity_bytes: int
    segments: int
    puts: int
    raw_bytes: int
    stored_bytes: int
    hits: int
    misses_by_cause: Mapping[MissCause, int]
    evicted_blocks: int
    reinserted_blocks: int
    skipped_segments: int
    foreign_files: int
    recovered_segments: int
    corrupt_frames: int
    torn_bytes: int
    footer_failures: int
    index_bytes: int
    engine: EngineKind
    direct: bool
    buffered_segments: int


class SsdTier:
    """Blocks on a local disk. Thread-safe: one writer at a time, readers beside it."""

    def __init__(
        self,
        directory: Path,
        *,
        keyspace: bytes,
        lock: DirectoryLock,
        index: BlockIndex,
        log: SegmentLog,
        found: Found,
        engines: tuple[IoEngine, IoEngine],
        kind: EngineKind,
        codecs: CodecRegistry,
    ) -> None:
        """For `open`, which callers use."""
        self._engines = engines
        self._kind = kind
        self._reader = FrameReader(engines[0], codecs)
        self._codecs = codecs
        self._raw_bytes = 0
        self._stored_bytes = 0
        self._directory = directory
        self._keyspace = keyspace
        self._lock = lock
        self._index = index
        self._log = log
        self._found = found
        self._write_lock = threading.Lock()
        self._count_lock = threading.Lock()
        self._misses: Counter[MissCause] = Counter()
        self._hits = 0
        self._puts = 0
        self._closed = False

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        keyspace: bytes,
        capacity_bytes: int,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        fsync: FsyncMode = FsyncMode.BATCH,
        mode: IoMode = IoMode.AUTO,
        engine: EngineKind = EngineKind.AUTO,
        depth: int = DEFAULT_DEPTH,
        codecs: CodecRegistry | None = None,
        io: SegmentIo | None = None,
    ) -> SsdTier:
        """Takes the directory, finds what is in it, and brings it under the cap.

        `segment_bytes` is kept between 1/256 and 1/8 of the capacity; a larger frame gets a
        segment of its own. `keyspace` (32 bytes) marks what is written; blocks of other keyspaces
        stay, count and are readable, since keys are unique. `mode` and `engine` fall back to what
        the system grants; `depth` bounds the operations of a batch that are under way. `codecs`
        say how blocks are encoded and which can be read. An `io` does every read and write.

        Raises:
            TierBusyError: another tier holds the directory.
            TierError: the medium failed.
            ConfigError: the capacity or the keyspace cannot be used.
        """
        if capacity_bytes < MIN_CAPACITY_BYTES:
            raise ConfigError(f"an SSD tier needs {MIN_CAPACITY_BYTES} bytes or more")
        if len(keyspace) != KEY_BYTES:
            raise ConfigError(f"a keyspace fingerprint has {KEY_BYTES} bytes, not {len(keyspace)}")
        most, least = (capacity_bytes // share for share in _SHARES)
        with ExitStack() as undo:
            kind, reads, writes = open_engines(engine, depth=depth, io=io)
            undo.callback(writes.close)
            undo.callback(reads.close)
            lock = DirectoryLock(directory)
            undo.callback(lock.release)
            index = BlockIndex()
            found = recover(directory, io or PosixIo(), index, undo)
            log = SegmentLog(
                directory,
                io=io or PosixIo(),
                engine=writes,
                index=index,
                limits=LogLimits(
                    capacity_bytes=capacity_bytes,
                    segment_bytes=max(min(segment_bytes, most), least, 4 * PAGE_BYTES),
                    fsync=fsync,
                    foreign_bytes=found.untouched_bytes,
                    direct=mode is not IoMode.BUFFERED,
                ),
                segments=found.segments,
                next_number=found.next_number,
            )
            log.enforce_cap()
            log.seal_recovered(found.unsealed)
            log.go_direct()
            undo.pop_all()
        return cls(
            directory,
            keyspace=keyspace,
            lock=lock,
            index=index,
            log=log,
            found=found,
            engines=(reads, writes),
            kind=kind,
            codecs=codecs or CodecRegistry(),
        )

    def contains(self, key: Key) -> bool:
        """Whether `key` is durable here. No I/O, no lock."""
        return key in self._index

    def contains_run(self, keys: Sequence[Key]) -> int:
        """How many keys from the first on are durable here. No I/O, no lock."""
        return self._index.contains_run(keys)

    def present(self, keys: Sequence[Key]) -> bytes:
        """A byte for each key: 1 where it is durable here, else 0."""
        return self._index.present(keys)

    def put(self, payloads: Sequence[Payload]) -> None:
        """Appends blocks; one fdatasync, then they are visible. Present keys are skipped.

        Raises:
            TierFullError: no room even after reclaiming.
            TierError: the medium failed. What was not made durable is absent.
            FormatError: a block is not of the layout that the codecs are for.
            ClosedError: the tier was closed.
        """
        with held(self._write_lock):
            self._require_open()
            seen: set[Key] = set()
            try:
                for payload in payloads:
                    if payload.key in seen or self.contains(payload.key):
                        continue
                    seen.add(payload.key)
                    self._append(encoded(payload, self._codecs))
            finally:
                self._log.commit()
            self._puts += len(seen)

    def _append(self, payload: Payload) -> None:
        header = block_header(payload, self._keyspace)
        self._log.append(header, payload.data.cast("B"))
        self._raw_bytes += header.raw_bytes
        self._stored_bytes += header.stored_bytes

    def read_into(self, key: Key, out: memoryview) -> Outcome:
        """Reads and proves one block. On a `MISS` the bytes of `out` are undefined.

        Raises:
            TierError: the medium failed.
            ClosedError: the tier was closed.
        """
        self._require_open()
        wanted = self._find(0, key, out)
        if isinstance(wanted, MissCause):
            return self._miss(wanted)
        with wanted.file.pinned() as alive:
            cause = self._reader.read_one(wanted) if alive else MissCause.ABSENT
        return self._settle(wanted.place, cause)

    def read_many(
        self, items: Sequence[tuple[Key, memoryview]]
    ) -> Iterator[tuple[int, Outcome | TierError]]:
        """Reads and proves many blocks, several at once; see `tiers.protocol.BatchReader`.

        Raises:
            ClosedError: the tier was closed.
        """
        self._require_open()
        return self._read_many(items)

    def _read_many(
        self, items: Sequence[tuple[Key, memoryview]]
    ) -> Iterator[tuple[int, Outcome | TierError]]:
        wanted: dict[int, WantedFrame] = {}
        with ExitStack() as pins:
            files: dict[int, bool] = {}
            for i, (key, out) in enumerate(items):
                found = self._find(i, key, out)
                if isinstance(found, MissCause):
                    yield i, self._miss(found)
                    continue
                number = found.place.segment
                if number not in files:
                    files[number] = pins.enter_context(found.file.pinned())
                if files[number]:
                    wanted[i] = found
                else:
                    yield i, self._miss(MissCause.ABSENT)
            for i, result in self._reader.read(list(wanted.values())):
                if isinstance(result, TierError):
                    yield i, result
                else:
                    yield i, self._settle(wanted[i].place, result)

    def _find(self, index: int, key: Key, out: memoryview) -> WantedFrame | MissCause:
        place = self._index.get(key)
        file = self._log.file(place.segment) if place is not None else None
        if place is None or file is None:
            return MissCause.ABSENT
        out = out.cast("B")
        if len(out) != place.raw_bytes:
            return MissCause.SIZE
        return WantedFrame(index, place, file, out)

    def _settle(self, place: Place, cause: MissCause | None) -> Outcome:
        if cause is not None:
            if cause is not MissCause.ABSENT:
                self._index.drop([place])
            return self._miss(cause)
        self._index.touch(place)
        with held(self._count_lock):
            self._hits += 1
        return Outcome.HIT

    def remove(self, keys: Iterable[Key]) -> None:
        """Hides blocks at once and appends tombstones, so that they stay hidden after a restart.

        Raises:
            TierError: a tombstone could not be written; the blocks are hidden until a restart.
            ClosedError: the tier was closed.
        """
        with held(self._write_lock):
            self._require_open()
            found = [p for p in map(self._index.get, dict.fromkeys(keys)) if p is not None]
            self._index.drop(found)
            try:
                for place in found:
                    self._log.append(tombstone_header(place.key, self._keyspace), _NOTHING)
            finally:
                self._log.commit()

    def tell_evictions(self, tell: Callable[[Sequence[Key]], None]) -> None:
        """See `tiers.protocol.TellsEvictions`."""
        self._log.evictions.listener = tell

    def list_blocks(self, *, newest_first: bool = False) -> Iterator[ListedBlock]:
        """See `tiers.protocol.Lists`; reads the segments' footers."""
        segments = self._log.segments()
        return list_blocks(segments, self._index, self._keyspace, newest_first=newest_first)

    def clear(self) -> None:
        """Deletes every segment of this version; newer ones and foreign files stay.

        Raises:
            TierError: a segment cannot be deleted.
            ClosedError: the tier was closed.
        """
        with held(self._write_lock):
            self._require_open()
            self._log.clear()
            self._index.clear()

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Reads every frame; drops nothing. `progress` gets segments done and segments in all.

        Raises:
            TierError: the medium failed.
            ClosedError: the tier was closed.
        """
        with held(self._write_lock):
            self._require_open()
            ends = self._log.ends()
        return scan_directory(self._directory, progress=progress, ends=ends)

    def space(self) -> Space:
        """See `tiers.protocol.TellsSpace`."""
        return Space(self._log.used_bytes, self._log.limits.capacity_bytes)

    def stats(self) -> SsdStats:
        """Counters now; takes no lock that I/O holds."""
        with held(self._count_lock):
            misses, hits = dict(self._misses), self._hits
        return SsdStats(
            blocks=len(self._index),
            bytes_used=self._log.used_bytes,
            capacity_bytes=self._log.limits.capacity_bytes,
            segments=self._log.segment_count,
            puts=self._puts,
            raw_bytes=self._raw_bytes,
            stored_bytes=self._stored_bytes,
            hits=hits,
            misses_by_cause=misses,
            evicted_blocks=self._log.evicted_blocks,
            reinserted_blocks=self._log.reinserted_blocks,
            skipped_segments=self._found.skipped_segments,
            foreign_files=self._found.foreign_files,
            recovered_segments=len(self._found.unsealed),
            corrupt_frames=self._found.corrupt_frames,
            torn_bytes=self._found.torn_bytes,
            footer_failures=self._log.footer_failures,
            index_bytes=self._index.memory_bytes,
            engine=self._kind,
            direct=self._log.limits.direct,
            buffered_segments=self._log.buffered_segments,
        )

    def close(self) -> None:
        """Seals the active segment and gives the directory back. Idempotent.

        Raises:
            TierError: the medium failed; the directory is given back nevertheless.
        """
        with held(self._write_lock):
            if self._closed:
                return
            self._closed = True
            try:
                self._log.close()
            finally:
                self._index.clear()
                for engine in self._engines:
                    engine.close()
                self._lock.release()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the SSD tier in {self._directory} was closed")

    def _miss(self, cause: MissCause) -> Outcome:
        with held(self._count_lock):
            self._misses[cause] += 1
        return Outcome.MISS
