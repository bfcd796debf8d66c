"""`LowerTierSuite`: what every medium below DRAM must do. Subclass it and define `open_tier`."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvist.core.errors import ClosedError, TierFullError
from kvist.core.outcome import Outcome
from kvist.native import checksum, digest
from kvist.tiers.protocol import BatchReader, LowerTier, Payload, RunFinder

BLOCK_BYTES = 8192
CAPACITY_BYTES = 1 << 20
THREAD_TIMEOUT_S = 30.0


def suite_key(i: int) -> bytes:
    """A key that is as random as a real one, and the same in every process."""
    return digest(b"key %d" % i)


def suite_block(i: int, size_bytes: int = BLOCK_BYTES) -> bytes:
    """The only right bytes of `suite_key(i)`."""
    return (digest(b"block %d" % i) * (size_bytes // 32 + 1))[:size_bytes]


def suite_payload(i: int, size_bytes: int = BLOCK_BYTES) -> Payload:
    """Block `i`, child of block `i - 1`."""
    parent = suite_key(i - 1) if i else None
    return Payload(suite_key(i), parent, memoryview(suite_block(i, size_bytes)))


def read_block(tier: LowerTier, i: int, size_bytes: int = BLOCK_BYTES) -> bytes | None:
    """Bytes of block `i`, or `None` for a miss."""
    out = bytearray(size_bytes)
    hit = tier.read_into(suite_key(i), memoryview(out)) is Outcome.HIT
    return bytes(out) if hit else None


class LowerTierSuite:
    """Subclass as `class TestMine(LowerTierSuite)`."""

    def open_tier(self, directory: Path, capacity_bytes: int = CAPACITY_BYTES) -> LowerTier:
        """A tier on the medium that belongs to `directory`: what it held before, it holds again."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> LowerTier:
        return self.open_tier(tmp_path)

    def test_what_is_put_is_read_back_equal(self, tier: LowerTier) -> None:
        tier.put([suite_payload(i) for i in range(10)])
        assert [read_block(tier, i) for i in range(10)] == [suite_block(i) for i in range(10)]
        assert all(tier.contains(suite_key(i)) for i in range(10))
        tier.close()

    def test_absent_key_is_a_miss(self, tier: LowerTier) -> None:
        assert not tier.contains(suite_key(1))
        assert read_block(tier, 1) is None
        tier.close()

    def test_empty_put_is_no_op(self, tier: LowerTier) -> None:
        tier.put([])
        tier.close()

    def test_first_writer_wins(self, tier: LowerTier) -> None:
        tier.put([suite_payload(1)])
        tier.put([Payload(suite_key(1), None, memoryview(bytes(BLOCK_BYTES)))] * 2)
        assert read_block(tier, 1) == suite_block(1)
        tier.close()

    def test_sizes_that_fill_no_page_are_kept_exactly(self, tier: LowerTier) -> None:
        sizes = [1, 31, 4095, 4096, 4097, 12_289]
        tier.put([suite_payload(i, size) for i, size in enumerate(sizes)])
        for i, size in enumerate(sizes):
            assert read_block(tier, i, size) == suite_block(i, size)
        tier.close()

    def test_buffer_of_wrong_size_is_a_miss_and_keeps_the_block(self, tier: LowerTier) -> None:
        tier.put([suite_payload(1)])
        assert read_block(tier, 1, BLOCK_BYTES - 1) is None
        assert read_block(tier, 1, BLOCK_BYTES + 1) is None
        assert read_block(tier, 1) == suite_block(1)
        tier.close()

    def test_payload_may_change_after_put(self, tier: LowerTier) -> None:
        data = bytearray(suite_block(1))
        tier.put([Payload(suite_key(1), None, memoryview(data))])
        data[:] = bytes(BLOCK_BYTES)
        assert read_block(tier, 1) == suite_block(1)
        tier.close()

    def test_blocks_survive_reopening(self, tier: LowerTier, tmp_path: Path) -> None:
        tier.put([suite_payload(i) for i in range(5)])
        tier.close()
        again = self.open_tier(tmp_path)
        assert [read_block(again, i) for i in range(5)] == [suite_block(i) for i in range(5)]
        again.close()

    def test_removed_blocks_stay_absent_after_reopening(
        self, tier: LowerTier, tmp_path: Path
    ) -> None:
        tier.put([suite_payload(i) for i in range(5)])
        tier.remove([suite_key(1), suite_key(3), suite_key(99)])
        assert [tier.contains(suite_key(i)) for i in range(5)] == [True, False, True, False, True]
        tier.close()
        again = self.open_tier(tmp_path)
        assert [again.contains(suite_key(i)) for i in range(5)] == [True, False, True, False, True]
        assert read_block(again, 1) is None
        again.close()

    def test_removed_block_can_be_put_again(self, tier: LowerTier, tmp_path: Path) -> None:
        tier.put([suite_payload(1)])
        tier.remove([suite_key(1)])
        tier.put([suite_payload(1)])
        assert read_block(tier, 1) == suite_block(1)
        tier.close()
        again = self.open_tier(tmp_path)
        assert read_block(again, 1) == suite_block(1)
        again.close()

    def test_newest_blocks_stay_when_the_cap_is_exceeded(self, tier: LowerTier) -> None:
        count = 3 * CAPACITY_BYTES // BLOCK_BYTES
        for i in range(count):
            tier.put([suite_payload(i)])
            assert tier.contains(suite_key(i))
        assert not tier.contains(suite_key(0))
        for i in range(count):
            assert read_block(tier, i) in (None, suite_block(i))
        assert read_block(tier, count - 1) == suite_block(count - 1)
        tier.close()

    def test_block_larger_than_the_cap_is_refused(self, tier: LowerTier) -> None:
        tier.put([suite_payload(1)])
        big = Payload(suite_key(2), None, memoryview(bytes(CAPACITY_BYTES + 1)))
        with pytest.raises(TierFullError):
            tier.put([big])
        assert not tier.contains(suite_key(2))
        assert read_block(tier, 1) == suite_block(1)
        tier.close()

    def test_close_is_idempotent_and_final(self, tier: LowerTier) -> None:
        tier.put([suite_payload(1)])
        tier.close()
        tier.close()
        assert not tier.contains(suite_key(1))
        with pytest.raises(ClosedError):
            tier.put([suite_payload(2)])
        with pytest.raises(ClosedError):
            read_block(tier, 1)
        with pytest.raises(ClosedError):
            tier.remove([suite_key(1)])

    def test_many_are_read_as_one_is(self, tier: LowerTier) -> None:
        if not isinstance(tier, BatchReader):
            pytest.skip("this tier reads one block at a time")
        sizes = [BLOCK_BYTES, 1, 4097, BLOCK_BYTES, 100, BLOCK_BYTES, 70_000]
        tier.put([suite_payload(i, size) for i, size in enumerate(sizes)])
        order = [3, 0, 1, 99, 2, 6, 5, 4, 0]
        outs = [bytearray(sizes[i] if i < len(sizes) else 10) for i in order]
        outs.append(bytearray(BLOCK_BYTES + 1))  # of the wrong size
        items = [(suite_key(i), memoryview(o)) for i, o in zip([*order, 0], outs, strict=True)]
        outcomes = dict(tier.read_many(items))
        assert len(outcomes) == len(items)
        for n, i in enumerate(order):
            assert outcomes[n] is (Outcome.MISS if i == 99 else Outcome.HIT)
            if i != 99:
                assert bytes(outs[n]) == suite_block(i, sizes[i])
        assert outcomes[len(order)] is Outcome.MISS
        assert list(tier.read_many([])) == []
        next(tier.read_many(items[:4]))  # abandoned: its blocks are no longer held
        tier.close()
        with pytest.raises(ClosedError):
            list(tier.read_many(items))

    def test_run_of_present_keys_ends_at_the_first_absent(self, tier: LowerTier) -> None:
        if not isinstance(tier, RunFinder):
            pytest.skip("this tier looks up one key at a time")
        tier.put([suite_payload(i) for i in range(20) if i != 12])
        keys = [suite_key(i) for i in range(20)]
        assert [tier.contains_run(k) for k in (keys, keys[:5], keys[12:], [])] == [12, 5, 0, 0]
        tier.close()
        assert tier.contains_run(keys) == 0

    def test_readers_beside_a_writer_never_see_wrong_bytes(self, tier: LowerTier) -> None:
        rounds = 2 * CAPACITY_BYTES // BLOCK_BYTES
        wrong: list[int] = []
        done = threading.Event()

        def read() -> None:
            i = 0
            while not done.is_set():
                data = read_block(tier, i % rounds)
                if data is not None and checksum(data) != checksum(suite_block(i % rounds)):
                    wrong.append(i)
                i += 7

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            for i in range(rounds):
                tier.put([suite_payload(i)])
        finally:
            done.set()
            for reader in readers:
                reader.join(timeout=THREAD_TIMEOUT_S)
        assert wrong == []
        tier.close()
