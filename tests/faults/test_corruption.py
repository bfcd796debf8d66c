"""Whatever is done to the files, the store answers with right bytes or a counted miss."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from disk_store import (
    BLOCK_BYTES,
    FRAME_BYTES,
    WAIT_S,
    DiskStore,
    disk_store,
    forget_dram,
    read,
    read_one_by_one,
    write_below,
)

from kvist.codec.frame import PAGE_BYTES, seal_page
from kvist.testing.store_suite import key, put
from kvist.tiers.ssd import MissCause, SsdTier

COUNT = 8
VICTIM = 3
FIELDS = {  # offset of a bit in a frame, and why its block is then a miss
    "magic": (0, MissCause.HEADER),
    "sequence": (17, MissCause.HEADER),
    "key": (60, MissCause.HEADER),
    "stored bytes": (193, MissCause.HEADER),
    "header checksum": (4090, MissCause.HEADER),
    "payload": (PAGE_BYTES + 77, MissCause.PAYLOAD),
    "payload's end": (FRAME_BYTES - 1, MissCause.PAYLOAD),
}


def frame_at(i: int) -> int:
    return PAGE_BYTES + i * FRAME_BYTES


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def of_newer_version(page: bytes) -> bytes:
    """A header page that says, with a valid checksum, that it is of version 2."""
    return seal_page(page[:8] + b"\x02\x00" + page[10:-8])


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*.kvs"))


def fill(directory: Path, *, sealed: bool = True) -> Path:
    """A segment with blocks 0 to COUNT; unsealed as a crash leaves it."""
    with disk_store(directory) as disk:
        put(disk.store, range(COUNT))
        assert disk.store.flush(WAIT_S)
    (path,) = segments(directory)
    if not sealed:
        os.truncate(path, frame_at(COUNT))
    return path


def reads(disk: DiskStore, *, batched: bool) -> list[int]:
    return read(disk.store, range(COUNT)) if batched else read_one_by_one(disk.store, range(COUNT))


def writes_again(disk: DiskStore) -> None:
    """What was lost can be written again, goes down, and is read back from there."""
    put(disk.store, range(COUNT))
    assert disk.store.flush(WAIT_S)
    forget_dram(disk)
    assert read(disk.store, range(COUNT)) == list(range(COUNT))


@pytest.fixture(params=[True, False], ids=["batched", "single"])
def batched(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("cut_bytes", [1, 4096, 4097, BLOCK_BYTES, FRAME_BYTES - 1])
def test_torn_tail_costs_the_last_block(tmp_path: Path, cut_bytes: int, batched: bool) -> None:
    path = fill(tmp_path, sealed=False)
    os.truncate(path, frame_at(COUNT) - cut_bytes)
    with disk_store(tmp_path) as disk:
        assert reads(disk, batched=batched) == list(range(COUNT - 1))
        stats = disk.tier.stats()
        assert (stats.torn_bytes, stats.recovered_segments) == (FRAME_BYTES - cut_bytes, 1)
        assert disk.stats().read_absent == 1
        writes_again(disk)


@pytest.mark.parametrize("size_bytes", [0, 100, 4096, 5000, frame_at(2), frame_at(5) + 5000])
def test_truncated_segment_costs_what_was_cut_off(
    tmp_path: Path, size_bytes: int, batched: bool
) -> None:
    os.truncate(fill(tmp_path), size_bytes)
    left = max(0, (size_bytes - PAGE_BYTES) // FRAME_BYTES)
    with disk_store(tmp_path) as disk:
        assert reads(disk, batched=batched) == list(range(left))
        assert disk.tier.stats().recovered_segments == 1
        assert disk.stats().read_absent == COUNT - left
        writes_again(disk)


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
@pytest.mark.parametrize("field", FIELDS)
def test_flipped_bit_in_a_frame_costs_its_block_only(
    tmp_path: Path, field: str, sealed: bool, batched: bool
) -> None:
    path = fill(tmp_path, sealed=sealed)
    offset, cause = FIELDS[field]
    flip(path, frame_at(VICTIM) + offset)
    with disk_store(tmp_path) as disk:
        assert reads(disk, batched=batched) == [n for n in range(COUNT) if n != VICTIM]
        if sealed:
            assert disk.tier.stats().misses_by_cause == {cause: 1}
            assert disk.stats().load_missed == 1
        else:  # a scan finds it when the tier is opened
            assert disk.tier.stats().corrupt_frames == 1
            assert disk.stats().read_absent == 1
        assert not disk.tier.contains(key(VICTIM))
        writes_again(disk)


@pytest.mark.parametrize("where", ["footer", "entry", "trailer", "end", "segment header"])
def test_flipped_bit_outside_frames_costs_no_block(
    tmp_path: Path, where: str, batched: bool
) -> None:
    path = fill(tmp_path)
    footer, size = frame_at(COUNT), path.stat().st_size
    at = {
        "footer": footer,
        "entry": footer + 40,
        "trailer": size - PAGE_BYTES + 20,
        "end": size - 1,
        "segment header": 30,
    }
    flip(path, at[where])
    with disk_store(tmp_path) as disk:
        assert reads(disk, batched=batched) == list(range(COUNT))
        # A footer that is not valid is counted: its segment was scanned.
        assert disk.tier.stats().recovered_segments == (where != "segment header")
        writes_again(disk)


def test_swapped_segments_keep_their_blocks(tmp_path: Path, batched: bool) -> None:
    fill(tmp_path)
    with disk_store(tmp_path) as disk:
        write_below(disk.store, range(100, 104))
        disk.store.evict([key(0)])
    first, second = segments(tmp_path)
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    with disk_store(tmp_path) as disk:
        assert reads(disk, batched=batched) == list(range(1, COUNT))
        assert read(disk.store, range(100, 104)) == list(range(100, 104))
        assert disk.stats().read_absent == 1
        writes_again(disk)


def test_segment_of_a_newer_version_is_skipped_and_kept(tmp_path: Path, batched: bool) -> None:
    path = fill(tmp_path)
    overwrite(path, 0, of_newer_version(path.read_bytes()[:PAGE_BYTES]))
    future = path.read_bytes()
    with disk_store(tmp_path, capacity_bytes=1 << 20) as disk:
        assert reads(disk, batched=batched) == []
        assert disk.tier.stats().skipped_segments == 1
        assert disk.stats().read_absent == COUNT
        writes_again(disk)
        disk.store.clear()
    assert path.read_bytes() == future


def test_foreign_files_are_counted_and_kept(tmp_path: Path, batched: bool) -> None:
    fill(tmp_path)
    (tmp_path / "readme.txt").write_text("hello")
    foreign = tmp_path / "segment-0000000000000077.kvs"
    foreign.write_bytes(b"not a segment" * 1000)
    with disk_store(tmp_path) as disk:
        assert reads(disk, batched=batched) == list(range(COUNT))
        assert disk.tier.stats().foreign_files == 2
        writes_again(disk)
        disk.store.clear()
    assert foreign.read_bytes() == b"not a segment" * 1000
    assert (tmp_path / "readme.txt").read_text() == "hello"


@dataclass(frozen=True, slots=True)
class Damage:
    """Done to an open segment: blocks that it may cost, and the causes that are counted."""

    do: Callable[[Path], None]
    costs: frozenset[int]
    causes: frozenset[MissCause]


def swap_frames(path: Path) -> None:
    data = path.read_bytes()
    one, two = (data[frame_at(i) : frame_at(i + 1)] for i in (VICTIM, VICTIM + 1))
    overwrite(path, frame_at(VICTIM), two + one)


def age_forward(path: Path) -> None:
    page = path.read_bytes()[frame_at(VICTIM) :][:PAGE_BYTES]
    overwrite(path, frame_at(VICTIM), of_newer_version(page))


ONLINE = {
    "truncated": Damage(
        lambda path: os.truncate(path, frame_at(VICTIM) + 10),
        frozenset(range(VICTIM, COUNT)),
        frozenset({MissCause.SHORT}),
    ),
    "emptied": Damage(
        lambda path: os.truncate(path, 0), frozenset(range(COUNT)), frozenset({MissCause.SHORT})
    ),
    "foreign": Damage(
        lambda path: overwrite(path, 0, b"not a segment" * 10_000),
        frozenset(range(COUNT)),
        frozenset({MissCause.HEADER}),
    ),
    "zeroed": Damage(
        lambda path: overwrite(path, 0, bytes(frame_at(COUNT))),
        frozenset(range(COUNT)),
        frozenset({MissCause.HEADER}),
    ),
    "frames swapped": Damage(
        swap_frames, frozenset({VICTIM, VICTIM + 1}), frozenset({MissCause.IDENTITY})
    ),
    "newer frame": Damage(age_forward, frozenset({VICTIM}), frozenset({MissCause.VERSION})),
    **{
        f"bit in {field}": Damage(
            lambda path, offset=offset: flip(path, frame_at(VICTIM) + offset),
            frozenset({VICTIM}),
            frozenset({cause}),
        )
        for field, (offset, cause) in FIELDS.items()
    },
}


@pytest.mark.parametrize("kind", ONLINE)
def test_damage_under_an_open_store_is_a_counted_miss(
    tmp_path: Path, kind: str, batched: bool
) -> None:
    damage = ONLINE[kind]
    path = fill(tmp_path)
    with disk_store(tmp_path) as disk:
        assert len(disk.store.match([key(n) for n in range(COUNT)])) == COUNT
        damage.do(path)
        assert reads(disk, batched=batched) == [n for n in range(COUNT) if n not in damage.costs]
        assert disk.stats().load_missed == len(damage.costs)
        assert disk.stats().load_failed == 0  # no fault of the medium: no breaker is moved
        counted = disk.tier.stats().misses_by_cause
        assert (set(counted), sum(counted.values())) == (damage.causes, len(damage.costs))
        writes_again(disk)
    with disk_store(tmp_path) as disk:
        assert read(disk.store, range(COUNT)) == list(range(COUNT))


def test_segments_swapped_under_an_open_store_are_counted_misses(
    tmp_path: Path, batched: bool
) -> None:
    fill(tmp_path)
    with disk_store(tmp_path) as disk:
        write_below(disk.store, range(100, 100 + COUNT))
    first, second = segments(tmp_path)
    with disk_store(tmp_path) as disk:
        one, two = first.read_bytes(), second.read_bytes()
        first.write_bytes(two)
        second.write_bytes(one)
        assert reads(disk, batched=batched) == []
        assert disk.stats().load_missed == COUNT
        assert disk.tier.stats().misses_by_cause == {MissCause.IDENTITY: COUNT}
        writes_again(disk)


def test_deleted_files_cost_nothing_until_the_store_is_opened_again(tmp_path: Path) -> None:
    path = fill(tmp_path)
    with disk_store(tmp_path) as disk:
        path.unlink()
        assert read(disk.store, range(COUNT)) == list(range(COUNT))
    with disk_store(tmp_path) as disk:
        assert read(disk.store, range(COUNT)) == []
        writes_again(disk)


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_never_gives_wrong_bytes_or_an_exception(tmp_path: Path, seed: int) -> None:
    """Flips, cuts and garbage anywhere, in several files at once, before and while it is open."""
    chance = random.Random(seed)

    def spoil() -> None:
        for path in segments(tmp_path):
            size = path.stat().st_size
            action = chance.randrange(4)
            if action == 0:
                os.truncate(path, chance.randrange(size + 1))
            elif action == 1:
                overwrite(path, chance.randrange(size + 1), chance.randbytes(9000))
            size = path.stat().st_size
            for _ in range(chance.randrange(4) if size else 0):
                flip(path, chance.randrange(size))

    known = range(60)
    with disk_store(tmp_path, segment_bytes=1) as disk:
        write_below(disk.store, known)
    for _ in range(6):
        spoil()
        with disk_store(tmp_path, segment_bytes=1) as disk:
            read_one_by_one(disk.store, chance.sample(known, 20))
            spoil()
            for start in range(0, 60, 10):
                read(disk.store, known[start : start + 10])
            lost = [n for n in known if not disk.tier.contains(key(n))]
            write_below(disk.store, lost)


def test_directory_of_garbage_opens_as_an_empty_tier(tmp_path: Path) -> None:
    for n in range(5):
        (tmp_path / f"segment-{n:016x}.kvs").write_bytes(os.urandom(20_000))
    tier = SsdTier.open(tmp_path, keyspace=bytes(32), capacity_bytes=4 << 20)
    assert (tier.stats().blocks, tier.stats().foreign_files) == (0, 5)
    tier.close()
    with disk_store(tmp_path) as disk:
        assert read(disk.store, range(COUNT)) == []
        writes_again(disk)
