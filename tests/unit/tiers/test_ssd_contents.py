"""Which blocks a segment holds: the list of a tier, and what a reclaim says is gone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvist.core.errors import TierError
from kvist.core.keys import Key
from kvist.native import digest
from kvist.tiers.protocol import Payload
from kvist.tiers.ssd import FsyncMode, SsdTier
from kvist.tiers.ssd.striped import StripedTier

KEYS = [digest(b"%d" % n) for n in range(120)]
BLOCK = bytes(60_000)


def open_tier(folder: Path) -> SsdTier:
    """A tier of eight segments, some sixty blocks in all."""
    return SsdTier.open(
        folder,
        keyspace=bytes(32),
        capacity_bytes=4 << 20,
        segment_bytes=1 << 19,
        fsync=FsyncMode.OFF,
    )


def put(tier: SsdTier | StripedTier, keys: Sequence[Key]) -> None:
    for key in keys:
        tier.put([Payload(key, None, memoryview(BLOCK))])


def test_what_is_told_to_be_gone_is_what_is_not_listed_any_more(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    gone: list[Key] = []
    tier.tell_evictions(gone.extend)
    put(tier, KEYS[:20])
    for key in KEYS[:3]:  # hot: they are written again when their segment goes
        tier.read_into(key, memoryview(bytearray(len(BLOCK))))
    put(tier, KEYS[20:])
    listed = [block.key for block in tier.list_blocks()]
    assert set(listed) == {key for key in KEYS if tier.contains(key)}
    assert len(listed) == len(set(listed)) == len(KEYS) - len(gone)
    assert set(gone).isdisjoint(listed)
    assert len(gone) == tier.stats().evicted_blocks
    tier.close()


def test_list_names_parents_and_leaves_out_what_was_removed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put([Payload(KEYS[0], None, memoryview(BLOCK))])
    tier.put([Payload(KEYS[1], KEYS[0], memoryview(BLOCK))])
    tier.put([Payload(KEYS[2], KEYS[1], memoryview(BLOCK))])
    tier.remove([KEYS[1]])
    want = [(KEYS[0], None), (KEYS[2], KEYS[1])]
    assert [(b.key, b.parent) for b in tier.list_blocks()] == want
    tier.close()
    again = open_tier(tmp_path)
    assert [(b.key, b.parent) for b in again.list_blocks()] == want
    again.close()


def test_a_segment_that_goes_while_it_is_listed_is_skipped(tmp_path: Path) -> None:
    put(tier := open_tier(tmp_path), KEYS[:20])
    tier.close()
    tier = open_tier(tmp_path)
    first, *_ = sorted(tmp_path.glob("*.kvs"))
    first.unlink()
    assert 0 < len(list(tier.list_blocks())) < 20
    second = sorted(tmp_path.glob("*.kvs"))[0]
    second.rename(tmp_path / "aside")
    second.mkdir()
    with pytest.raises(TierError):
        list(tier.list_blocks())


def test_a_block_that_another_folder_has_is_not_told_to_be_gone(tmp_path: Path) -> None:
    """It was written to one folder while the other rested, so that both have it now."""
    one, two = open_tier(tmp_path / "one"), open_tier(tmp_path / "two")
    put(one, KEYS[:5])
    put(two, KEYS[:5])
    tier = StripedTier([("one", one, 1.0), ("two", two, 1.0)])
    gone: list[Key] = []
    tier.tell_evictions(gone.extend)
    put(one, KEYS[20:])
    assert not any(one.contains(key) for key in KEYS[:5])
    assert gone
    assert set(gone).isdisjoint(KEYS[:5])
    assert {b.key for b in tier.list_blocks()} == {k for k in KEYS if tier.contains(k)}
    tier.close()
