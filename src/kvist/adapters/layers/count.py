"""Count: how many calls of each kind there were, how long they took, what they moved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import TypeVar

from kvist.adapters.layers.layer import Layer, Operation
from kvist.adapters.protocol import Fetched, Got, NewObject, Put, PutReport, StorageAdapter, Wanted

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class OperationCounts:
    """Totals of one kind of call: those made and failed, their seconds, bytes really moved."""

    calls: int = 0
    failed: int = 0
    seconds: float = 0.0
    moved_bytes: int = 0


class CountLayer(Layer):
    """Counts; changes nothing."""

    def __init__(
        self, inner: StorageAdapter, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
        self._clock = clock
        self._lock = Lock()
        self._counts = {operation: OperationCounts() for operation in Operation}

    def counts(self) -> Mapping[Operation, OperationCounts]:
        """A copy of the totals."""
        with self._lock:
            return dict(self._counts)

    def around(self, operation: Operation, size_bytes: int, call: Callable[[], _T]) -> _T:
        """Makes the call and counts it."""
        began_s = self._clock()
        failed = True
        try:
            result = call()
            failed = False
            return result
        finally:
            took_s = self._clock() - began_s
            with self._lock:
                old = self._counts[operation]
                self._counts[operation] = replace(
                    old,
                    calls=old.calls + 1,
                    failed=old.failed + failed,
                    seconds=old.seconds + took_s,
                )

    def get(self, wanted: Sequence[Wanted]) -> list[Fetched]:
        answers = super().get(wanted)
        pairs = zip(wanted, answers, strict=True)
        self._moved(Operation.GET, sum(w.size_bytes for w, a in pairs if a.got is Got.HIT))
        return answers

    def put(self, objects: Sequence[NewObject]) -> PutReport:
        report = super().put(objects)
        pairs = zip(objects, report.outcomes, strict=True)
        self._moved(Operation.PUT, sum(o.size_bytes for o, r in pairs if r is Put.STORED))
        return report

    def _moved(self, operation: Operation, size_bytes: int) -> None:
        with self._lock:
            old = self._counts[operation]
            self._counts[operation] = replace(old, moved_bytes=old.moved_bytes + size_bytes)
