"""Several directories: placement, a directory that comes, one that fails."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvist.core.errors import TierError, TierFullError
from kvist.core.outcome import Outcome
from kvist.testing.tier_suite import BLOCK_BYTES, read_block, suite_block, suite_key, suite_payload
from kvist.tiers.ssd import FsyncMode, PosixIo, SsdTier
from kvist.tiers.ssd.striped import StripedTier

COUNT = 200


class SwitchedIo(PosixIo):
    """Fails every transfer while `code` is set."""

    code = 0

    def _check(self) -> None:
        if self.code:
            raise OSError(self.code, "switched off")

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check()
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check()
        return super().preadv(fd, buffers, offset)


class Disks:
    """A striped tier over directories that can be switched off, with a clock that stands."""

    def __init__(self, root: Path, weights: dict[str, float]) -> None:
        self.now = 0.0
        self.ios = {name: SwitchedIo() for name in weights}
        self.parts = {
            name: SsdTier.open(
                root / name,
                keyspace=bytes(32),
                capacity_bytes=64 << 20,
                fsync=FsyncMode.OFF,
                io=self.ios[name],
            )
            for name in weights
        }
        self.tier = StripedTier(
            [(name, self.parts[name], weight) for name, weight in weights.items()],
            rest_s=10.0,
            clock=lambda: self.now,
        )

    def where(self, i: int) -> list[str]:
        return [name for name, part in self.parts.items() if part.contains(suite_key(i))]


def test_blocks_are_spread_by_weight(tmp_path: Path) -> None:
    disks = Disks(tmp_path, {"a": 1.0, "b": 3.0})
    disks.tier.put([suite_payload(i, 100) for i in range(1000)])
    share = sum(disks.where(i) == ["b"] for i in range(1000))
    assert 680 < share < 820
    assert all(len(disks.where(i)) == 1 for i in range(1000))
    disks.tier.close()


def test_directory_that_is_added_moves_nothing(tmp_path: Path) -> None:
    disks = Disks(tmp_path, {"a": 1.0, "b": 1.0})
    disks.tier.put([suite_payload(i) for i in range(COUNT)])
    before = [disks.where(i) for i in range(COUNT)]
    disks.tier.close()
    disks = Disks(tmp_path, {"c": 1.0, "a": 1.0, "b": 1.0})
    assert [disks.where(i) for i in range(COUNT)] == before
    disks.tier.put([suite_payload(i) for i in range(2 * COUNT)])
    assert [disks.where(i) for i in range(COUNT)] == before
    assert 30 < sum(disks.where(i) == ["c"] for i in range(COUNT, 2 * COUNT)) < 110
    outs = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(2 * COUNT)]
    outcomes = dict(disks.tier.read_many([(suite_key(i), out) for i, out in enumerate(outs)]))
    assert outcomes == dict.fromkeys(range(2 * COUNT), Outcome.HIT)
    assert [bytes(out) for out in outs] == [suite_block(i) for i in range(2 * COUNT)]
    disks.tier.close()


@pytest.mark.parametrize("many", [True, False])
def test_failed_directory_is_a_miss_for_its_blocks_only(tmp_path: Path, many: bool) -> None:
    disks = Disks(tmp_path, {"a": 1.0, "b": 1.0})
    disks.tier.put([suite_payload(i) for i in range(COUNT)])
    on_a = {i for i in range(COUNT) if disks.where(i) == ["a"]}
    disks.ios["a"].code = errno.EIO
    if many:
        outs = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(COUNT)]
        outcomes = dict(disks.tier.read_many([(suite_key(i), o) for i, o in enumerate(outs)]))
        assert {i for i, o in outcomes.items() if o is Outcome.MISS} == on_a
    else:
        assert {i for i in range(COUNT) if read_block(disks.tier, i) is None} == on_a
    assert not any(disks.tier.contains(suite_key(i)) for i in on_a)
    assert disks.tier.failures["a"] > 0
    disks.tier.put([suite_payload(i) for i in on_a])  # now they go to the other
    assert all(read_block(disks.tier, i) == suite_block(i) for i in range(COUNT))
    disks.ios["a"].code = 0
    disks.now = 11.0
    assert all(disks.tier.contains(suite_key(i)) for i in range(COUNT))
    disks.tier.remove([suite_key(i) for i in range(COUNT)])
    assert not any(disks.where(i) for i in range(COUNT))
    disks.tier.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_block_that_its_directory_refuses_goes_to_the_runner_up(tmp_path: Path, code: int) -> None:
    disks = Disks(tmp_path, {"a": 1.0, "b": 1.0})
    disks.ios["a"].code = code
    disks.tier.put([suite_payload(i) for i in range(COUNT)])
    assert all(disks.where(i) == ["b"] for i in range(COUNT))
    disks.tier.close()


@pytest.mark.parametrize(("code", "kind"), [(errno.EIO, TierError), (errno.ENOSPC, TierFullError)])
def test_put_fails_when_every_directory_does(
    tmp_path: Path, code: int, kind: type[TierError]
) -> None:
    disks = Disks(tmp_path, {"a": 1.0, "b": 1.0})
    for io in disks.ios.values():
        io.code = code
    with pytest.raises(kind):
        disks.tier.put([suite_payload(i) for i in range(COUNT)])
    assert not any(disks.tier.contains(suite_key(i)) for i in range(COUNT))
    for io in disks.ios.values():
        io.code = 0
    disks.tier.put(
        [suite_payload(i) for i in range(COUNT)]
    )  # all rest: they are asked all the same
    disks.now = 11.0
    assert all(read_block(disks.tier, i) == suite_block(i) for i in range(COUNT))
    disks.tier.close()


def test_members_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    disks = Disks(tmp_path, {"a": 1.0})
    part = disks.parts["a"]
    for members in ([], [("a", part, 1.0), ("a", part, 1.0)], [("a", part, 0.0)]):
        with pytest.raises(ValueError, match=r"members|weight"):
            StripedTier(members)
    disks.tier.close()
