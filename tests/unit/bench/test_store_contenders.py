"""Every contender of the store benchmark gives back what it was given, or says that it did not."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvist.bench.store import driven
from kvist.bench.store.contender import (
    Blocks,
    Contender,
    ContenderError,
    round_keys,
    share_out,
)
from kvist.bench.store.disk import KvistDisk, RawDisk, medium_of
from kvist.bench.store.driven import Driven, Peer, find_peer
from kvist.bench.store.files import DurableFiles, PlainFiles
from kvist.bench.store.lookup import Lookups
from kvist.bench.store.memory import LAYOUT, Checksums, KvistMemory, Memcpy, Order
from kvist.bench.store.redis import Redis

COUNT = 3


@pytest.fixture
def blocks() -> Iterator[Blocks]:
    with Blocks(count=COUNT, block_bytes=LAYOUT.block_bytes, seed=3) as made:
        yield made


MAKERS: dict[str, Callable[[Blocks, Path], Contender]] = {
    "memcpy": lambda b, _: Memcpy(b, threads=2),
    "raw": lambda b, f: RawDisk(b, f, write_depth=1, read_depth=2),
    "kvist-disk": lambda b, f: KvistDisk(b, f, threads=2),
    "files": lambda b, f: PlainFiles(b, f, threads=2),
    "durable-files": lambda b, f: DurableFiles(b, f, threads=2),
}
for _order in Order:
    for _sums in Checksums:
        MAKERS[f"kvist-{_order.value}-{_sums.value}"] = lambda b, _, o=_order, s=_sums: KvistMemory(
            b, o, s, threads=2
        )


@pytest.mark.parametrize("name", MAKERS)
def test_a_contender_gives_back_every_block_in_every_round(
    name: str, blocks: Blocks, tmp_path: Path
) -> None:
    contender = MAKERS[name](blocks, tmp_path)
    try:
        for turn in range(2):
            assert contender.write(turn) > 0
            blocks.target[:] = 0
            took_s = contender.read(turn)
            assert took_s is not None
            assert took_s > 0
            assert np.array_equal(blocks.target, blocks.source)
    finally:
        contender.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == []


def test_other_bytes_than_were_stored_are_an_error(blocks: Blocks, tmp_path: Path) -> None:
    files = PlainFiles(blocks, tmp_path, threads=1)
    files.write(0)
    (tmp_path / "files" / "1").write_bytes(bytes(blocks.block_bytes))
    with pytest.raises(ContenderError, match="other bytes for block 1"):
        files.read(0)


def test_a_block_that_kvist_has_not_is_an_error(blocks: Blocks, tmp_path: Path) -> None:
    for contender in (
        KvistMemory(blocks, Order.HEADS_APART, Checksums.NONE, threads=1),
        KvistDisk(blocks, tmp_path, threads=1),
    ):
        contender.write(0)
        with pytest.raises(ContenderError):
            contender.read(1)
        contender.close()


def test_redis_gives_back_every_block_and_its_log_is_no_store(
    blocks: Blocks, tmp_path: Path
) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    for durable in (False, True):
        redis = Redis(blocks, tmp_path, threads=2, durable=durable)
        try:
            assert redis.write(0) > 0
            assert (redis.read(0) is None) is durable
        finally:
            redis.close()


def test_without_a_server_redis_is_refused(
    blocks: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ContenderError, match="not installed"):
        Redis(blocks, tmp_path, threads=1, durable=False)


DRIVER = """
import sys
sys.path.insert(0, {drivers!r})
from obey import forget, load_blocks, obey, prove

class Peer:
    def __init__(self, settings):
        if settings["medium"] == "disk":
            raise RuntimeError("no disk")
        self.source, self.target = load_blocks(settings)
        self.kept = None
    def write(self, n):
        print("chatter")
        self.kept = self.source.copy()
        return 0.5
    def read(self, n):
        if n == 7:
            raise SystemExit("gone")
        forget(self.target)
        if n != 9:
            self.target[:] = self.kept
        prove(self.source, self.target)
        return 0.25
    def close(self):
        pass

obey(Peer)
"""


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(drivers=str(driven._DRIVERS)))
    return Peer("peer", Path(sys.executable), script)


def test_a_driven_peer_is_asked_in_turns(peer: Peer, blocks: Blocks, tmp_path: Path) -> None:
    made = Driven(peer, blocks, tmp_path, medium="dram")
    assert made.write(0) == 0.5
    assert made.read(0) == 0.25
    made.close()
    assert not (tmp_path / "peer-dram").exists()


@pytest.mark.parametrize(("turn", "says"), [(9, "other bytes for block 0"), (7, "has ended: gone")])
def test_a_driven_peer_that_fails_says_why(
    peer: Peer, blocks: Blocks, tmp_path: Path, turn: int, says: str
) -> None:
    made = Driven(peer, blocks, tmp_path, medium="dram")
    made.write(0)
    with pytest.raises(ContenderError, match=says):
        made.read(turn)
    made.close()


def test_a_driven_peer_that_cannot_start_says_why(
    peer: Peer, blocks: Blocks, tmp_path: Path
) -> None:
    with pytest.raises(ContenderError, match="no disk"):
        Driven(peer, blocks, tmp_path, medium="disk")


def test_a_peer_without_an_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVIST_BENCH_PEERS", str(tmp_path))
    with pytest.raises(ContenderError, match="no environment"):
        find_peer("mooncake")


def test_rounds_share_no_key() -> None:
    assert not set(round_keys(0, 50)) & set(round_keys(1, 50))


def test_work_that_fails_on_a_thread_is_an_error() -> None:
    def fail(i: int) -> None:
        if i == 3:
            raise OSError("no space")

    with pytest.raises(ContenderError, match="no space"):
        share_out(2, 5, fail)


def test_a_log_of_holes_opens_as_a_real_one(tmp_path: Path) -> None:
    lookups = Lookups(tmp_path, indexed_blocks=5000, match_keys=300, block_bytes=1 << 20)
    opened_s, index_bytes, match_s = lookups.measure()
    assert min(opened_s, index_bytes, match_s) > 0
    lookups.measure()
    lookups.close()
    assert list(tmp_path.iterdir()) == []


def test_the_medium_is_that_of_the_deepest_mount() -> None:
    assert medium_of(Path("/proc/self")) == "proc"
