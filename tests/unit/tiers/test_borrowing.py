"""An own tier beside lenders: where blocks are read from, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pytest

from kvist.core.errors import TierError
from kvist.core.keys import Key
from kvist.core.outcome import Outcome, Tier
from kvist.testing.tier_suite import (
    BLOCK_BYTES,
    suite_block,
    suite_key,
    suite_payload,
)
from kvist.tiers.borrowing import BorrowingTier
from kvist.tiers.protocol import Payload


class Shelf:
    """Both sides in a dict: an own tier when it is written to, a lender when it is filled."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self.blocks = {suite_key(i): suite_block(i) for i in numbers}
        self.probed = {suite_key(i) for i in numbers}  # of those, what `known_run` knows of
        self.empty_handed: set[Key] = set()
        self.broken = False
        self.reads: list[Key] = []
        self.closed = False
        self.metric = "kvist_peer_blocks_total.p"

    def contains(self, key: Key) -> bool:
        return key in self.blocks

    def contains_run(self, keys: Sequence[Key]) -> int:
        self.probed |= self.blocks.keys() & set(keys)
        return self.known_run(keys)

    def known_run(self, keys: Sequence[Key]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.probed), len(keys))

    def put(self, payloads: Sequence[Payload]) -> None:
        for payload in payloads:
            self.blocks[payload.key] = bytes(payload.data)
            self.probed.add(payload.key)

    def read_into(self, key: Key, out: memoryview) -> Outcome:
        outcome = dict(self.read_many([(key, out)]))[0]
        assert isinstance(outcome, Outcome)
        return outcome

    def read_many(
        self, items: Sequence[tuple[Key, memoryview]]
    ) -> Iterator[tuple[int, Outcome | TierError]]:
        for i, (key, out) in enumerate(items):
            self.reads.append(key)
            if self.broken:
                yield i, TierError("broken")
            elif key in self.empty_handed or key not in self.blocks:
                self.probed.discard(key)
                self.blocks.pop(key, None)
                yield i, Outcome.MISS
            else:
                out[:] = self.blocks[key]
                yield i, Outcome.HIT

    def remove(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.blocks.pop(key, None)
            self.probed.discard(key)

    def clear(self) -> None:
        self.remove(list(self.blocks))

    def tell_evictions(self, tell: object) -> None: ...

    def samples(self) -> Mapping[str, float]:
        return {self.metric: float(len(self.reads))}

    def close(self) -> None:
        self.closed = True


def _read(tier: BorrowingTier, numbers: Sequence[int]) -> list[Outcome | TierError]:
    outs = [bytearray(BLOCK_BYTES) for _ in numbers]
    items = [(suite_key(i), memoryview(o)) for i, o in zip(numbers, outs, strict=True)]
    outcomes = dict(tier.read_many(items))
    for n, i in enumerate(numbers):
        if outcomes[n] is Outcome.HIT:
            assert bytes(outs[n]) == suite_block(i)
    return [outcomes[n] for n in range(len(numbers))]


HIT, MISS = Outcome.HIT, Outcome.MISS


def test_each_block_is_read_where_it_is_nearest() -> None:
    own, lender = Shelf([0, 1, 4]), Shelf([1, 2, 3])
    tier = BorrowingTier(own, lender)
    assert tier.contains_run([suite_key(i) for i in range(7)]) == 5
    assert tier.tiers_of([suite_key(i) for i in range(5)]) == (
        Tier.SSD,
        Tier.SSD,
        Tier.PEER,
        Tier.PEER,
        Tier.SSD,
    )
    assert _read(tier, [0, 1, 2, 3, 4, 5]) == [HIT] * 5 + [MISS]
    assert lender.reads == [suite_key(2), suite_key(3)]
    totals = tier.read_totals()
    assert totals[Tier.SSD].size_bytes == 3 * BLOCK_BYTES
    assert totals[Tier.PEER].size_bytes == 2 * BLOCK_BYTES


def test_what_one_turns_out_not_to_have_is_asked_of_the_other() -> None:
    own, lender = Shelf([0, 1]), Shelf([1, 2])
    own.empty_handed.add(suite_key(1))
    lender.empty_handed.add(suite_key(2))
    own.put([])
    tier = BorrowingTier(own, lender)
    assert _read(tier, [0, 1, 2]) == [HIT, HIT, MISS]


def test_failure_of_the_own_medium_is_told_and_not_that_of_lenders() -> None:
    own, lender = Shelf([0]), Shelf([1])
    own.broken = True
    own_only, lent = _read(BorrowingTier(own, lender), [0, 1])
    assert isinstance(own_only, TierError)
    assert lent is HIT


def test_only_what_is_here_is_kept_held_and_written() -> None:
    own, lender = Shelf(), Shelf([0])
    tier = BorrowingTier(own, lender)
    key = suite_key(0)
    assert tier.contains(key)
    assert not tier.keeps(key)
    assert not tier.holds(key)
    assert tier.lacks(key)
    tier.put([suite_payload(0)])
    assert tier.keeps(key)
    assert tier.holds(key)
    assert not tier.lacks(key)
    tier.remove([key])
    assert not tier.contains(key)


def test_without_an_own_tier_a_put_claims_nothing() -> None:
    tier = BorrowingTier(None, Shelf([1]))
    tier.put([suite_payload(0)])
    assert not tier.contains(suite_key(0))
    assert not tier.lacks(suite_key(1))
    assert _read(tier, [0, 1]) == [MISS, HIT]
    assert list(tier.list_blocks()) == []
    tier.clear()
    assert not tier.contains(suite_key(1))


def test_closing_closes_both_and_ends_everything() -> None:
    own, lender = Shelf([0]), Shelf([1])
    tier = BorrowingTier(own, lender)
    for _ in range(2):
        tier.close()
    assert own.closed
    assert lender.closed
    assert not tier.contains(suite_key(0))
    with pytest.raises(RuntimeError):
        tier.put([suite_payload(2)])


def test_numbers_of_both_are_shown() -> None:
    own = Shelf([0])
    own.metric = "kvist_remote_known_blocks"
    tier = BorrowingTier(own, Shelf([1]))
    assert _read(tier, [1]) == [HIT]
    assert tier.samples() == {"kvist_peer_blocks_total.p": 1.0, "kvist_remote_known_blocks": 0.0}
