"""Discovery by a folder that the nodes share: one small file a node.

    FOLDER/NODE.json        its record, and after how many seconds of silence it is void
    FOLDER/.NODE.TOKEN      one that is being written

Files are written beside their name, synced and renamed to it, so a reader sees a whole record or
the former one. How they age: `notes.py`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from kvist.cluster.discovery.notes import MOST_NOTES, Note, Sightings
from kvist.cluster.record import (
    MOST_RECORD_BYTES,
    NodeRecord,
    decode_record,
    encode_record,
)
from kvist.core.errors import FormatError, TierError

_SUFFIX = ".json"


class FileDiscovery:
    """A `Discovery` over a folder on any mount that the nodes share."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        """Makes the folder (mode 0700) if it is absent. `clock`: seconds that never go back.

        Raises:
            TierError: it cannot be used.
        """
        self._folder = folder
        self._sightings = Sightings(clock)
        self.unreadable = 0
        with _mapped("make"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def announce(self, record: NodeRecord, *, ttl_s: float) -> None:
        data = msgspec.json.encode(Note(ttl_s, msgspec.Raw(encode_record(record))))
        beside = self._folder / f".{record.node}.{secrets.token_hex(8)}"
        with _mapped("write"):
            try:
                descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                beside.replace(self._folder / f"{record.node}{_SUFFIX}")
            finally:
                beside.unlink(missing_ok=True)
        self._collect()

    def withdraw(self, node: str) -> None:
        with _mapped("remove"):
            (self._folder / f"{node}{_SUFFIX}").unlink(missing_ok=True)

    def members(self) -> list[NodeRecord]:
        found = []
        for name in self._names():
            note = self._read(name)
            if note is None:
                continue
            try:
                record = decode_record(bytes(note.record))
            except FormatError:
                self.unreadable += 1
                continue
            self._see(name)
            live = self._sightings.is_live(name, note.ttl_s)
            if live and f"{record.node}{_SUFFIX}" == name:
                found.append(record)
        return found

    def close(self) -> None:
        return

    def _names(self) -> list[str]:
        with _mapped("list"):
            names = sorted(n for n in os.listdir(self._folder) if n.endswith(_SUFFIX))
        self._sightings.keep(frozenset(names))
        return names[:MOST_NOTES]

    def _read(self, name: str) -> Note | None:
        path = self._folder / name
        try:
            with path.open("rb") as file:
                data = file.read(2 * MOST_RECORD_BYTES)
            note = msgspec.json.decode(data, type=Note)
        except FileNotFoundError:
            return None  # withdrawn since it was listed
        except (OSError, msgspec.DecodeError):
            self.unreadable += 1
            return None
        return note

    def _see(self, name: str) -> None:
        with suppress(FileNotFoundError), _mapped("stat"):
            stat = (self._folder / name).stat()
            self._sightings.see(name, (stat.st_mtime_ns, stat.st_ino))

    def _collect(self) -> None:
        for name in self._names():
            note = self._read(name)
            if note is None:
                continue
            self._see(name)
            if self._sightings.is_waste(name, note.ttl_s):
                with _mapped("remove"):
                    (self._folder / name).unlink(missing_ok=True)


@contextmanager
def _mapped(what: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TierError(error.errno, f"discovery cannot {what}: {error}") from error
