"""Distributions learned online: output lengths by tenant and endpoint, and times of decode.

A distribution is a histogram of geometric buckets, each a twentieth wider than the one before, so
that a quantile is right to 5 %. Older values fade: one counts half after `HALF_LIFE` others.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import accumulate

HALF_LIFE = 2000
MAX_GROUPS = 1024
_GROWTH = math.log(1.05)
_BUCKETS = 400  # 1.05 ** 400 is 3e8
_LEAST_COUNT = 20  # below, a group is not believed and a wider one is asked
_RESCALE = 1e12


class Distribution:
    """What values of at least `least` are like. One owner; no clock."""

    __slots__ = ("_above", "_asked", "_least", "_next", "_sum", "_weights", "count", "total")

    def __init__(self, least: float = 1.0) -> None:
        self._least = least
        self._weights = [0.0] * _BUCKETS
        self._next = 1.0  # weight of the next value: grows in place of all others' fading
        self._above: list[float] | None = None  # weight from each bucket on
        self._asked: tuple[float, float] | None = None  # the last ratio and its quantile
        self._sum = 0.0  # of values by weight
        self.count = 0
        self.total = 0.0

    @property
    def mean(self) -> float:
        """Mean; 0 where nothing was seen."""
        return self._sum / self.total if self.count else 0.0

    def add(self, value: float) -> None:
        """Learns from one value; what is below `least` counts as `least`."""
        self._weights[self._bucket(value)] += self._next
        self._sum += self._next * max(value, self._least)
        self.total += self._next
        self.count += 1
        self._next *= 2 ** (1 / HALF_LIFE)
        self._above = None
        self._asked = None
        if self._next > _RESCALE:
            self._weights = [weight / self._next for weight in self._weights]
            self.total /= self._next
            self._sum /= self._next
            self._next = 1.0

    def quantile(self, ratio: float) -> float:
        """The value that `ratio` of all do not exceed, to 5 %; 0 where nothing was seen."""
        if not self.count:
            return 0.0
        if self._asked is None or self._asked[0] != ratio:
            self._asked = ratio, self._quantile(ratio)
        return self._asked[1]

    def _quantile(self, ratio: float) -> float:
        left, last = ratio * self.total, 0
        for bucket, weight in enumerate(self._weights):
            if weight:
                left, last = left - weight, bucket
                if left <= 0:
                    break
        return self._value(last + 0.5)  # rounding may leave a little of the whole

    def survival(self, value: float) -> float:
        """Share of values above `value`, interpolated in its bucket; 1 where nothing was seen."""
        if not self.count or value <= self._least:
            return 1.0
        above = self._above
        if above is None:
            above = [*accumulate(reversed(self._weights))][::-1]
            above.append(0.0)
            self._above = above
        place = math.log(value / self._least) / _GROWTH
        bucket = int(place)
        if bucket >= _BUCKETS:
            return 0.0
        share = place - bucket
        return (above[bucket] * (1 - share) + above[bucket + 1] * share) / above[0]

    def outlives(self, age: float, more: float) -> float:
        """Chance that what is `age` already lasts `more`; beyond all that was seen, 1/2."""
        now = self.survival(age)
        return self.survival(age + more) / now if now > 0 else 0.5

    def _bucket(self, value: float) -> int:
        if value <= self._least:
            return 0
        return min(_BUCKETS - 1, int(math.log(value / self._least) / _GROWTH))

    def _value(self, place: float) -> float:
        return self._least * math.exp(place * _GROWTH)


class Groups:
    """Distributions by (tenant, endpoint); the least recently used group is forgotten first."""

    __slots__ = ("_groups", "_least", "all")

    def __init__(self, least: float = 1.0) -> None:
        """`least` is of values, as in `Distribution`."""
        self._least = least
        self._groups: OrderedDict[tuple[str, str], Distribution] = OrderedDict()
        self.all = Distribution(least)

    def observe(self, tenant: str, endpoint: str, value: float) -> None:
        """Learns from a request that ended by itself."""
        group = self._groups.get((tenant, endpoint))
        if group is None:
            group = self._groups[tenant, endpoint] = Distribution(self._least)
        self._groups.move_to_end((tenant, endpoint))
        group.add(value)
        self.all.add(value)
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)

    def of(self, tenant: str, endpoint: str) -> Distribution:
        """What a group is like; one that is hardly known is taken to be like all."""
        group = self._groups.get((tenant, endpoint))
        return self.all if group is None or group.count < _LEAST_COUNT else group

    def __len__(self) -> int:
        return len(self._groups)
