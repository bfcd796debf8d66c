"""Discovery by the store of a Ray cluster's head (extra `ray`): one key a node.

    namespace kvist-NAME    NODE → its record, and after how many seconds of silence it is void

Ray's store has no times to live; how keys age: `notes.py`. This process becomes no Ray worker, only
a client of the head (GCS).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled, without stubs
from ray.exceptions import RayError

from kvist.cluster.discovery.notes import MOST_NOTES, Note, Sightings
from kvist.cluster.record import NodeRecord, decode_record, encode_record
from kvist.core.errors import FormatError, TierError

_DEFAULT_NAME = "kvist"


class RayDiscovery:
    """A `Discovery` over a Ray head's store. Each call ends within `timeout_s` a round trip."""

    def __init__(self, place: str, clock: Callable[[], float], *, timeout_s: float = 2.0) -> None:
        """Connects when it is first needed.

        Args:
            place: HOST:PORT/NAME: of the head, and of one of its clusters of nodes.
            clock: seconds that never go back.
            timeout_s: of one round trip.
        """
        self._address, _, name = place.partition("/")
        self._options = {
            "namespace": f"kvist-{name or _DEFAULT_NAME}".encode(),
            "timeout": timeout_s,
        }
        self._sightings = Sightings(clock)
        self._lock = threading.Lock()
        self._client: GcsClient | None = None
        self.unreadable = 0

    def announce(self, record: NodeRecord, *, ttl_s: float) -> None:
        stamp = secrets.token_hex(8)
        data = msgspec.json.encode(Note(ttl_s, msgspec.Raw(encode_record(record)), stamp))
        with _mapped("announce"):
            key = record.node.encode()
            self._gcs().internal_kv_put(key, data, overwrite=True, **self._options)
        for name, note in self._notes().items():
            if self._sightings.is_waste(name, note.ttl_s):
                self.withdraw(name)

    def withdraw(self, node: str) -> None:
        with _mapped("withdraw"):
            self._gcs().internal_kv_del(node.encode(), del_by_prefix=False, **self._options)

    def members(self) -> list[NodeRecord]:
        found = []
        for name, note in sorted(self._notes().items()):
            try:
                record = decode_record(bytes(note.record))
            except FormatError:
                self.unreadable += 1
                continue
            if record.node == name and self._sightings.is_live(name, note.ttl_s):
                found.append(record)
        return found

    def close(self) -> None:
        with self._lock:
            self._client = None

    def _notes(self) -> dict[str, Note]:
        """Every note that can be read, by name; sees each."""
        with _mapped("list"):
            names = sorted(self._gcs().internal_kv_keys(b"", **self._options))[:MOST_NOTES]
            values = self._gcs().internal_kv_multi_get(names, **self._options) if names else {}
        notes: dict[str, Note] = {}
        for name, value in values.items():
            try:
                notes[name.decode()] = note = msgspec.json.decode(value, type=Note)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self.unreadable += 1
                continue
            self._sightings.see(name.decode(), note.stamp)
        self._sightings.keep(notes)
        return notes

    def _gcs(self) -> GcsClient:
        with self._lock:
            if self._client is None:
                self._client = GcsClient(address=self._address)
            return self._client


@contextmanager
def _mapped(what: str) -> Iterator[None]:
    try:
        yield
    except (RayError, OSError, RuntimeError) as error:
        raise TierError(f"discovery by Ray cannot {what}: {error}") from error
