"""Chaos: faults of a medium on demand, all of them drawn from one seed."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from threading import Event, Lock
from typing import TypeVar

from kvist.adapters.layers.layer import Layer, Operation
from kvist.adapters.protocol import (
    Fetched,
    Got,
    NewObject,
    Page,
    PutReport,
    StorageAdapter,
    Wanted,
)
from kvist.core.errors import TierError

_T = TypeVar("_T")


class Blow(Enum):
    """What can go wrong with one call."""

    ERROR = "error"  # it fails; a put may have been done
    DELAY = "delay"  # it takes longer
    CUT = "cut"  # an object arrives, or is stored, without its end
    FLIP = "flip"  # a bit of an object arrives, or is stored, turned over
    FORGET = "forget"  # a listing leaves names out; an object that is there is not found


class ChaosLayer(Layer):
    """Draws for every call, and every blow, whether it strikes."""

    def __init__(
        self,
        inner: StorageAdapter,
        *,
        seed: int,
        chances: Mapping[Blow, float],
        delay_s: float = 0.01,
        rest: Callable[[float], object] | None = None,
    ) -> None:
        """`chances` are from 0 to 1; blows that it does not name never strike."""
        super().__init__(inner)
        self._chance = random.Random(seed)
        self._chances = dict(chances)
        self._delay_s = delay_s
        self._rest = rest or Event().wait
        self._lock = Lock()
        self.struck: Counter[Blow] = Counter()

    def heal(self) -> None:
        """From now on nothing goes wrong."""
        with self._lock:
            self._chances.clear()

    def around(self, operation: Operation, size_bytes: int, call: Callable[[], _T]) -> _T:
        """Makes the call late, fails before it or after it, or leaves it alone.

        Raises:
            TierError: it was made to fail.
        """
        if self._strikes(Blow.DELAY):
            self._rest(self._delay_s * self._draw())
        if self._strikes(Blow.ERROR):
            if self._draw() < 0.5:
                call()
            raise TierError(errno.EIO, f"{operation.value} was made to fail")
        return call()

    def get(self, wanted: Sequence[Wanted]) -> list[Fetched]:
        answers = super().get(wanted)
        return [self._spoil(w, a) for w, a in zip(wanted, answers, strict=True)]

    def put(self, objects: Sequence[NewObject]) -> PutReport:
        return super().put([self._spoilt(new) for new in objects])

    def list_page(self, prefix: str, *, cursor: str | None = None, limit: int = 1000) -> Page:
        page = super().list_page(prefix, cursor=cursor, limit=limit)
        kept = tuple(entry for entry in page.entries if not self._strikes(Blow.FORGET))
        return Page(kept, page.cursor, page.partial)

    def _spoil(self, wanted: Wanted, answer: Fetched) -> Fetched:
        if answer.got is not Got.HIT:
            return answer
        if self._strikes(Blow.FORGET):
            return Fetched(Got.ABSENT)
        if not wanted.size_bytes:
            return answer
        if self._strikes(Blow.CUT):  # what has not arrived is whatever the buffers held
            cut = int(self._draw() * wanted.size_bytes)
            if self._draw() < 0.5:
                return Fetched(Got.SIZE, cut)
            _overwrite(wanted.into, cut)
        if self._strikes(Blow.FLIP):
            _flip(wanted.into, int(self._draw() * wanted.size_bytes * 8))
        return answer

    def _spoilt(self, new: NewObject) -> NewObject:
        cut, flip = self._strikes(Blow.CUT), self._strikes(Blow.FLIP)
        if not (cut or flip) or not new.size_bytes:
            return new
        data = bytearray(b"".join(new.parts))
        if flip:
            _flip((memoryview(data),), int(self._draw() * len(data) * 8))
        if cut:
            del data[int(self._draw() * len(data)) :]
        return NewObject(new.name, (memoryview(data),))

    def _strikes(self, blow: Blow) -> bool:
        with self._lock:
            chance = self._chances.get(blow, 0.0)
            strikes = chance > 0 and self._chance.random() < chance
            self.struck[blow] += strikes
            return strikes

    def _draw(self) -> float:
        with self._lock:
            return self._chance.random()


def _overwrite(into: Sequence[memoryview], start: int) -> None:
    """Turns every byte from `start` on into something else."""
    for part in into:
        flat = part.cast("B")
        for i in range(max(0, start), flat.nbytes):
            flat[i] ^= 0xA5
        start -= flat.nbytes


def _flip(into: Sequence[memoryview], bit: int) -> None:
    for part in into:
        flat = part.cast("B")
        if bit < 8 * flat.nbytes:
            flat[bit // 8] ^= 1 << bit % 8
            return
        bit -= 8 * flat.nbytes
