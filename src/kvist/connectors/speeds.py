"""What an engine has learned of its speed, kept beside its blocks for the next start.

One small JSON file in the SSD tier's folder, by keyspace. It is a hint: one that cannot be read or
written is none, and one that is wrong is corrected by the first passes. It is written by a thread
of its own, since the folder's medium may hang, and no more often than every few minutes.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import msgspec

_log = logging.getLogger("kvist.connectors")
_NAME = "speeds.json"
_PERIOD_S = 120.0
_MOST_KEYSPACES = 64
_MOST_BYTES = 1 << 16


class Speeds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prefill coefficients: seconds a pass, a token and a squared token (`cost/prefill.py`)."""

    a_s: float
    b_s: float
    c_s: float

    def __post_init__(self) -> None:
        values = (self.a_s, self.b_s, self.c_s)
        if not all(0 <= v < math.inf for v in values) or not any(values):
            raise ValueError(f"no time model has the coefficients {values}")


class KeptSpeeds:
    """The file of one folder. One owner."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = folder / _NAME
        self._clock = clock
        self._due_s = -math.inf
        self._writer: Thread | None = None

    def load(self, fingerprint: bytes) -> Speeds | None:
        """What an engine of this keyspace learned before; `None` if that cannot be had."""
        return self._read().get(fingerprint.hex())

    def keep(self, fingerprint: bytes, speeds: Speeds) -> None:
        """Keeps what was learned, some time; never blocks, never raises."""
        now_s = self._clock()
        if now_s < self._due_s or (self._writer is not None and self._writer.is_alive()):
            return
        self._due_s = now_s + _PERIOD_S
        self._writer = Thread(
            target=self._write, args=(fingerprint, speeds), name="kvist-speeds", daemon=True
        )
        self._writer.start()

    def finish(self, timeout_s: float) -> bool:
        """Waits for a write that is under way; whether none is left."""
        if self._writer is not None:
            self._writer.join(timeout_s)
            return not self._writer.is_alive()
        return True

    def _write(self, fingerprint: bytes, speeds: Speeds) -> None:
        kept = {k: v for k, v in self._read().items() if k != fingerprint.hex()}
        newest = dict(list(kept.items())[-(_MOST_KEYSPACES - 1) :])
        beside = self._path.with_name(f"{_NAME}.{os.getpid()}")
        try:
            beside.write_bytes(msgspec.json.encode(newest | {fingerprint.hex(): speeds}))
            beside.replace(self._path)
        except OSError as error:
            _log.warning("kvist: speeds are not kept: %s", error)

    def _read(self) -> dict[str, Speeds]:
        try:
            with self._path.open("rb") as file:
                return msgspec.json.decode(file.read(_MOST_BYTES), type=dict[str, Speeds])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return {}
