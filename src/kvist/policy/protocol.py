"""The contract of an eviction order, and the null order that holds nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from kvist.core.hints import Finish as Finish
from kvist.core.hints import Hints as Hints
from kvist.core.keys import Key


class EvictionPolicy(Protocol):
    """An order over the resident keys. Not thread-safe: the owner's lock guards it.

    A policy knows no sizes, no leases and no time: only the order of the calls that it gets.
    """

    def insert(self, key: Key, parent: Key | None) -> None:
        """Adds `key` as the most recent; a key that is present is touched instead."""
        ...

    def touch(self, key: Key) -> None:
        """Says that `key` was used; an absent key is ignored."""
        ...

    def remove(self, key: Key) -> None:
        """Forgets `key`; an absent key is ignored."""
        ...

    def victims(self) -> Iterator[Key]:
        """Every key exactly once, best victim first, lazily.

        Between two steps the caller may remove the key it was given last, and nothing else. A
        key that the caller does not remove was skipped (it is in use) and stays.
        """
        ...

    def __len__(self) -> int:
        """Number of keys."""
        ...


@runtime_checkable
class TakesHints(Protocol):
    """A policy that wants to know which request its calls belong to."""

    def begin(self, hints: Hints) -> None:
        """Says that the calls from here on, until the next `begin`, are of a request like this."""
        ...


@runtime_checkable
class Anticipates(Protocol):
    """A policy whose choice of a victim depends on what comes in."""

    def expect(self, key: Key) -> None:
        """Says that `key`, which is absent, comes in once the victims for it are gone."""
        ...


class NullPolicy:
    """Remembers nothing and so never has a victim: what a policy does at the very least."""

    def insert(self, key: Key, parent: Key | None) -> None:
        """Forgets `key` at once."""

    def touch(self, key: Key) -> None:
        """Does nothing."""

    def remove(self, key: Key) -> None:
        """Does nothing."""

    def victims(self) -> Iterator[Key]:
        """Empty."""
        return iter(())

    def __len__(self) -> int:
        return 0
