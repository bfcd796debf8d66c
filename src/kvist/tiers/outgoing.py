"""What waits to be done in a remote: copies of blocks to be stored, and removals.

One thread does it, so that whoever puts a block does not wait for a network. Copies take memory
under a byte cap; what does not fit is refused, the newest, since a block without its parents is of
no use. Removals that the remote does not take are owed, and come before the copies that follow.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Condition, Thread

from kvist.core.errors import ClosedError, KvistError
from kvist.core.keys import Key
from kvist.tiers.protocol import Payload
from kvist.tiers.remote.tier import RemoteTier

_log = logging.getLogger(__name__)
_BATCH_BLOCKS = 32
_BATCH_BYTES = 64 << 20
_WAKE_S = 0.5
_MOST_OWED = 100_000
_WARN_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class OutgoingStats:
    """Blocks and bytes that wait now; totals of blocks sent, refused and failed."""

    waiting: int = 0
    waiting_bytes: int = 0
    sent: int = 0
    refused: int = 0
    failed: int = 0


class Outgoing:
    """The queue and its thread. Thread-safe."""

    def __init__(self, remote: RemoteTier, *, most_bytes: int) -> None:
        """Starts the thread; at most `most_bytes` of copies wait."""
        self._remote = remote
        self._most_bytes = most_bytes
        self._work = Condition()
        self._waiting: dict[Key, Payload] = {}
        self._waiting_bytes = 0  # those being sent count
        self._sending: dict[Key, Payload] = {}
        self._owed: dict[Key, None] = {}
        self._counts = OutgoingStats()
        self._stopping = False
        self._warn_at_s = 0.0
        self._thread = Thread(target=self._serve, name="kvist-upload", daemon=True)
        self._thread.start()

    def add(self, payloads: Sequence[Payload]) -> None:
        """Copies blocks that the remote is not known to have, as many as there is room for."""
        if not self._remote.available():
            self._count(refused=len(payloads))
            return
        for payload in payloads:
            size_bytes = payload.data.nbytes
            with self._work:
                if payload.key in self._waiting or payload.key in self._sending:
                    continue
                if self._remote.known_run((payload.key,)):
                    continue
                if self._waiting_bytes + size_bytes > self._most_bytes:
                    self._count(refused=1)
                    continue
                self._waiting_bytes += size_bytes  # before the copy: the cap holds
            copy = replace(payload, data=memoryview(bytes(payload.data)))
            with self._work:
                self._waiting[payload.key] = copy
                self._work.notify_all()

    def remove(self, keys: Sequence[Key]) -> None:
        """Removes blocks from the queue and from the remote, now or when it can be reached."""
        with self._work:
            for key in keys:
                payload = self._waiting.pop(key, None)
                if payload is not None:
                    self._waiting_bytes -= payload.data.nbytes
        self._remove(keys)
        with self._work:
            self._owe(key for key in keys if key in self._sending)

    def clear(self) -> None:
        """Removes everything from the queue and every block of the keyspace from the remote.

        Raises:
            TierError: the remote failed.
        """
        with self._work:
            self._waiting_bytes -= sum(p.data.nbytes for p in self._waiting.values())
            self._waiting.clear()
        self._remote.clear()
        with self._work:
            self._owe(list(self._sending))

    def stats(self) -> OutgoingStats:
        """Counters now."""
        with self._work:
            waiting = len(self._waiting) + len(self._sending)
            return replace(self._counts, waiting=waiting, waiting_bytes=self._waiting_bytes)

    def wait_done(self, timeout_s: float) -> bool:
        """Whether everything has been done, or given up, within the time."""
        with self._work:
            return self._work.wait_for(
                lambda: not (self._waiting or self._sending or self._owed), timeout_s
            )

    def close(self, timeout_s: float) -> None:
        """Lets the thread end, which takes up to `timeout_s` each for its work and its end."""
        if self._remote.available():
            self.wait_done(timeout_s)
        with self._work:
            self._stopping = True
            self._work.notify_all()
            if self._waiting:
                _log.warning("remote: %d blocks were not sent", len(self._waiting))
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        while True:
            with self._work:
                while not (self._stopping or self._waiting or self._owed):
                    self._work.wait(_WAKE_S)
                if self._stopping:
                    return
                owed, self._owed = list(self._owed), {}
                batch = self._take_batch()
            if owed:
                self._remove(owed)
            if batch:
                self._send(batch)
            with self._work:
                self._sending = {}
                self._work.notify_all()
                if self._owed and not self._stopping and not batch:
                    self._work.wait(_WAKE_S)  # the remote does not answer

    def _take_batch(self) -> list[Payload]:
        batch: list[Payload] = []
        size_bytes = 0
        for payload in self._waiting.values():
            size_bytes += payload.data.nbytes
            if batch and (size_bytes > _BATCH_BYTES or len(batch) == _BATCH_BLOCKS):
                break
            batch.append(payload)
        for payload in batch:
            del self._waiting[payload.key]
        self._sending = {p.key: p for p in batch}
        return batch

    def _send(self, batch: Sequence[Payload]) -> None:
        failed = True
        try:
            self._remote.put(batch)
            failed = False
        except ClosedError:
            return
        except (KvistError, OSError) as error:
            self._warn(f"{len(batch)} blocks could not be stored", error)
        finally:
            with self._work:
                self._waiting_bytes -= sum(p.data.nbytes for p in batch)
                self._count(**{"failed" if failed else "sent": len(batch)})

    def _remove(self, keys: Sequence[Key]) -> None:
        """Removes what may be there; a remote that fails owes it."""
        try:
            self._remote.remove(keys)
        except (KvistError, OSError) as error:
            self._warn(f"{len(keys)} blocks could not be removed yet", error)
            with self._work:  # without those that were put again meanwhile
                again = self._waiting.keys() | self._sending.keys()
                self._owe(key for key in keys if key not in again)

    def _owe(self, keys: Iterable[Key]) -> None:
        """Lets the thread remove these, after what it is sending; caller holds the lock."""
        for key in keys:
            if len(self._owed) < _MOST_OWED:
                self._owed[key] = None
        self._work.notify_all()

    def _warn(self, what: str, error: Exception) -> None:
        """Says so, once in a while."""
        now_s = time.monotonic()
        if now_s >= self._warn_at_s:
            self._warn_at_s = now_s + _WARN_EVERY_S
            _log.warning("remote: %s: %s", what, error)

    def _count(self, *, sent: int = 0, refused: int = 0, failed: int = 0) -> None:
        with self._work:
            old = self._counts
            self._counts = replace(
                old,
                sent=old.sent + sent,
                refused=old.refused + refused,
                failed=old.failed + failed,
            )
