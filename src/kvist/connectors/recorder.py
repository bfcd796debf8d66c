"""A deployment's own trace: hashes and lengths of its requests, no text.

Format. A JSON object a line. The first is the header,
`{"kvist_recording": 1, "block_tokens": 128, "model": "Llama-3-8B"}`; each of the others is a
request in Mooncake's schema, with `session` and `cls`:
`{"timestamp": 1500, "input_length": 300, "output_length": 9, "hash_ids": [5, 8, 2], "session": "",
"cls": 2}`. Timestamps are milliseconds; lines stand in the order in which requests *ended*.

What the ids say. An id is a keyed hash of a block's key, as a number below 2^53. The salt is drawn
when the recorder is made and is never written, so that nobody can test a guessed prompt against a
file, nor join the files of two processes; the same block has the same id within one process. To
keep files small a recorded block is at least `MIN_BLOCK_TOKENS` long: several of the engine's.

States of a file: absent → header written → lines appended → renamed to `FILE.1` (which it replaces)
when it would grow beyond its cap, or when a new recorder finds it. A write that fails is cut off
again; its lines are dropped and counted, and the next write tries afresh. Only the last line of a
file may be torn, by a process that was killed; the reader leaves it out.
"""

from __future__ import annotations

import hashlib
import io
import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvist.core.hints import Finish

MAGIC = "kvist_recording"
VERSION = 1
MIN_BLOCK_TOKENS = 128
_ID_BITS = 53  # what every reader of JSON holds exactly
_MAX_BYTES = 256 * 1024**2
_MAX_QUEUED = 4096
_FLUSH_BYTES = 1 << 16
_FLUSH_S = 1.0
_CLOSE_S = 5.0


class Header(msgspec.Struct):
    """The first line of a recording."""

    kvist_recording: int
    block_tokens: int
    model: str = ""


class _Entry(msgspec.Struct):
    timestamp: int
    input_length: int
    output_length: int | None
    hash_ids: list[int]
    session: str
    cls: int


_Item = tuple[float, tuple[bytes, ...], int, int | None, Finish, str]


class _Ids:
    """Names of blocks and sessions that mean nothing outside this process."""

    def __init__(self, salt: bytes, stride: int) -> None:
        self._salt = salt
        self._stride = stride

    def number(self, value: bytes) -> int:
        digest = hashlib.blake2b(value, digest_size=8, key=self._salt).digest()
        return int.from_bytes(digest, "little") >> (64 - _ID_BITS)

    def chain(self, keys: Sequence[bytes], input_tokens: int, block_tokens: int) -> list[int]:
        """An id for every recorded block of the prompt, the last one partial."""
        full = keys[self._stride - 1 :: self._stride]
        ids = [self.number(key[:8]) for key in full]
        if len(ids) * block_tokens < input_tokens:
            # Met again only by a prompt as long whose last full block of the engine is the same.
            last = keys[-1] if keys else os.urandom(8)
            ids.append(self.number(last[:8] + b"%d" % input_tokens))
        return ids


class TraceRecorder:
    """Appends requests to a file from its own thread; safe to call from any, and never raises.

    Args:
        path: the file; what is there already becomes `FILE.1`.
        block_tokens: size of the engine's blocks.
        model: name of the model, for the header.
        max_bytes: size at which the file becomes `FILE.1`.
    """

    def __init__(
        self, path: Path, block_tokens: int, model: str, *, max_bytes: int = _MAX_BYTES
    ) -> None:
        stride = max(1, MIN_BLOCK_TOKENS // block_tokens)
        self._engine_block_tokens = block_tokens
        self._block_tokens = block_tokens * stride
        self._ids = _Ids(os.urandom(32), stride)
        header = msgspec.json.encode(Header(VERSION, self._block_tokens, model)) + b"\n"
        self._file = _File(path, header, max_bytes)
        self._queue: queue.Queue[_Item | None] = queue.Queue(_MAX_QUEUED)
        self._lock = threading.Lock()
        self._recorded = 0
        self._dropped = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvist-record", daemon=True)
        self._thread.start()

    @property
    def recorded(self) -> int:
        """Requests that stand in a file."""
        return self._recorded

    @property
    def dropped(self) -> int:
        """Requests lost to a full queue, a failing disk or a closed recorder."""
        return self._dropped

    def record(
        self,
        time_s: float,
        keys: Sequence[bytes],
        input_tokens: int,
        output_tokens: int | None,
        finish: Finish,
        session: str,
    ) -> None:
        """Notes one request; returns at once.

        Args:
            time_s: when it arrived, on a clock that never goes back.
            keys: of the full blocks of the prompt, from its start; more are ignored.
        """
        full = tuple(keys[: input_tokens // self._engine_block_tokens])
        item = (time_s, full, input_tokens, output_tokens, finish, session)
        try:
            if not self._closed:
                self._queue.put_nowait(item)
                return
        except queue.Full:
            pass  # the disk is slower than the traffic
        self._count(dropped=1)

    def close(self) -> None:
        """Writes what is queued, waiting for a bounded time; later requests are dropped."""
        self._closed = True
        try:
            self._queue.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return  # the disk hangs; the thread is a daemon
        self._thread.join(timeout=_CLOSE_S)

    def _count(self, *, recorded: int = 0, dropped: int = 0) -> None:
        with self._lock:
            self._recorded += recorded
            self._dropped += dropped

    def _run(self) -> None:
        batch: list[bytes] = []
        size_bytes = 0
        open_ = True
        while open_:
            idle = False
            try:
                item = self._queue.get(timeout=_FLUSH_S)
            except queue.Empty:
                idle = True
            else:
                if item is None:
                    open_ = False
                else:
                    batch.append(self._encoded(item))
                    size_bytes += len(batch[-1])
            if batch and (idle or not open_ or size_bytes >= _FLUSH_BYTES):
                self._write(batch)
                batch, size_bytes = [], 0
        self._file.close()

    def _write(self, batch: list[bytes]) -> None:
        try:
            self._file.append(b"".join(batch))
        except OSError:
            self._count(dropped=len(batch))
        else:
            self._count(recorded=len(batch))

    def _encoded(self, item: _Item) -> bytes:
        time_s, keys, input_tokens, output_tokens, finish, session = item
        entry = _Entry(
            timestamp=max(0, round(time_s * 1000)),
            input_length=input_tokens,
            output_length=output_tokens,
            hash_ids=self._ids.chain(keys, input_tokens, self._block_tokens),
            session=f"{self._ids.number(session.encode()):x}" if session else "",
            cls=int(finish),
        )
        return msgspec.json.encode(entry) + b"\n"


class _File:
    """An append-only file with a cap; after a failed write it holds whole lines again."""

    def __init__(self, path: Path, header: bytes, max_bytes: int) -> None:
        self._path = path
        self._header = header
        self._max_bytes = max_bytes
        self._file: io.FileIO | None = None
        self._size_bytes = 0  # of whole lines

    def append(self, lines: bytes) -> None:
        """Appends all of `lines` or nothing.

        Raises:
            OSError: the disk failed, or is full.
        """
        full = self._size_bytes > len(self._header) and (
            self._size_bytes + len(lines) > self._max_bytes
        )
        if self._file is None or full:
            self._start()
        self._put(lines)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _start(self) -> None:
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and self._path.stat().st_size:
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))
        self._size_bytes = 0
        # Lengths and times of requests are nobody else's business.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._file = io.FileIO(descriptor, "wb")
        self._put(self._header)

    def _put(self, content: bytes) -> None:
        assert self._file is not None
        try:
            written = self._file.write(content)
            if written != len(content):
                raise OSError(f"{self._path}: wrote {written} of {len(content)} bytes")
        except OSError:
            if not self._size_bytes:  # without its header a file is worth nothing
                self.close()
                raise
            self._file.truncate(self._size_bytes)
            self._file.seek(self._size_bytes)
            raise
        self._size_bytes += len(content)
