"""What a storage adapter must do: whole objects by name, and nothing that knows what a block is.

An adapter is synchronous and thread-safe, and its calls take many objects, so that a medium behind
a network pays one round trip a batch. An object is written whole or not at all, never changed, and
seen by everyone who opened the same medium; it may be gone at any moment. What a medium raises is
mapped once, in its adapter, to `TierError` and its kinds. `kvist.testing.adapter_suite` is this
contract as tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvist.core.errors import ClosedError

MAX_NAME_CHARS = 200
_NAME = re.compile(r"[0-9a-z]+(?:[/._-][0-9a-z]+)*")
_PREFIX = re.compile(r"(?:[0-9a-z]+[/._-])*[0-9a-z]*")


class Got(Enum):
    """What became of one object that was asked for."""

    HIT = "hit"
    ABSENT = "absent"
    SIZE = "size"  # it is there, and of another size than the buffers


class Put(Enum):
    """What became of one object that was to be stored."""

    STORED = "stored"
    PRESENT = "present"  # somebody was first; theirs stays


@dataclass(frozen=True, slots=True)
class Wanted:
    """One object to be read: its bytes go into `into`, one buffer after the other.

    Without buffers it is a probe: whether the object is there, at the cost of no bytes.
    """

    name: str
    into: tuple[memoryview, ...] = ()

    @property
    def size_bytes(self) -> int:
        """What the buffers hold together."""
        return sum(part.nbytes for part in self.into)


@dataclass(frozen=True, slots=True)
class Fetched:
    """The answer to one `Wanted`; `size_bytes` is the object's, 0 where it is absent."""

    got: Got
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NewObject:
    """One object to be stored: its name and its bytes, in parts (valid during the call)."""

    name: str
    parts: tuple[memoryview, ...]

    @property
    def size_bytes(self) -> int:
        """Size of the whole object."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class PutReport:
    """What became of each object, and which others the adapter dropped to make room."""

    outcomes: tuple[Put, ...]
    evicted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing; a size or a time that the medium does not tell is `None`.

    `modified_s` is on the medium's own clock.
    """

    name: str
    size_bytes: int | None = None
    modified_s: float | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a listing; `cursor` asks for the next part, `None` when this was the last.

    `partial`: the medium cannot name everything that is there, in this page or any other.
    """

    entries: tuple[Listed, ...]
    cursor: str | None = None
    partial: bool = False


class StorageAdapter(Protocol):
    """Objects on one medium. Every call ends by itself, at the latest at the adapter's deadline."""

    def get(self, wanted: Sequence[Wanted]) -> list[Fetched]:
        """Reads objects; an answer for each, in order.

        Only a `HIT` has filled its buffers; those of any other item are undefined. No buffer is
        touched after the call has returned or raised.

        Raises:
            TierTimeout: no answer before the deadline.
            TierError: the medium failed; some buffers may have been written to.
            ClosedError: the adapter was closed.
        """
        ...

    def put(self, objects: Sequence[NewObject]) -> PutReport:
        """Stores objects, durable as far as the medium knows that word. The first writer wins.

        Raises:
            TierFullError: no room; the others may have been stored.
            TierError: the medium failed. Each object is there whole or not at all.
            ClosedError: the adapter was closed.
        """
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Removes objects; absent ones are no fault.

        Raises:
            TierError: the medium failed; some may be gone.
            ClosedError: the adapter was closed.
        """
        ...

    def list_page(self, prefix: str, *, cursor: str | None = None, limit: int = 1000) -> Page:
        """Some objects whose names begin with `prefix`, about `limit` of them, in any order.

        Pages together name every object that is there all the while; one may come twice. A page
        may be empty and not be the last.

        Raises:
            TierError: the medium failed.
            ClosedError: the adapter was closed.
        """
        ...

    def close(self) -> None:
        """Lets go of connections and threads. Idempotent."""
        ...


def check_names(names: Iterable[str]) -> None:
    """Proves that names are safe on any medium: lower-case letters, digits, single `/ . _ -`.

    Raises:
        ValueError: one is not, or is too long.
    """
    for name in names:
        if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot be the name of an object")


def check_prefix(prefix: str) -> None:
    """Proves that `prefix` is the beginning of names that `check_names` takes.

    Raises:
        ValueError: it is not.
    """
    if len(prefix) > MAX_NAME_CHARS or not _PREFIX.fullmatch(prefix):
        raise ValueError(f"{prefix!r} cannot be the beginning of a name")


def scatter(data: memoryview, into: Sequence[memoryview]) -> None:
    """Copies `data` over buffers that hold exactly as much together."""
    at = 0
    for part in into:
        flat = part.cast("B")
        flat[:] = data[at : at + flat.nbytes]
        at += flat.nbytes


def answer(data: memoryview | None, wanted: Wanted) -> Fetched:
    """Fills the buffers of `wanted` from an object that a client brought whole."""
    if data is None:
        return Fetched(Got.ABSENT)
    if data.nbytes != wanted.size_bytes:
        return Fetched(Got.SIZE, data.nbytes)
    scatter(data, wanted.into)
    return Fetched(Got.HIT, data.nbytes)


class OpenState:
    """Whether an adapter is still open; part of every adapter."""

    def __init__(self, medium: str) -> None:
        self._medium = medium
        self.closed = False

    def demand(self) -> None:
        """Nothing, as long as it is open.

        Raises:
            ClosedError: it was closed.
        """
        if self.closed:
            raise ClosedError(f"the adapter of {self._medium} was closed")
