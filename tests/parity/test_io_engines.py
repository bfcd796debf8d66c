"""Every engine moves the same bytes, reports the same errors and owns its buffers long enough."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvist.native import io_twin

TIMEOUT_S = 30.0


@pytest.fixture(params=["pool", "uring"])
def engine(native: ModuleType, request: pytest.FixtureRequest) -> Any:
    module = io_twin if native.__name__.endswith("twin") else native
    try:
        engine = getattr(module, f"open_{request.param}")(4)
    except OSError as error:
        pytest.skip(f"no {request.param} here: {error}")
    yield engine
    engine.close()


def drain(batch: Any) -> dict[int, int]:
    done: dict[int, int] = {}
    while (one := batch.next()) is not None:
        assert one[0] not in done
        done[one[0]] = one[1]
    batch.close()
    return done


def test_batch_larger_than_the_depth_is_done_whole(engine: Any, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    parts = [os.urandom(1000 + i) for i in range(50)]
    offsets = [sum(map(len, parts[:i])) for i in range(50)]
    writes = [
        (True, fd, at, [memoryview(p)[:7], memoryview(p)[7:]])
        for at, p in zip(offsets, parts, strict=True)
    ]
    assert drain(engine.submit(writes)) == {i: len(p) for i, p in enumerate(parts)}
    into = [bytearray(len(p)) for p in parts]
    reads = [(False, fd, at, [memoryview(b)]) for at, b in zip(offsets, into, strict=True)]
    assert drain(engine.submit(reads)) == {i: len(p) for i, p in enumerate(parts)}
    assert into == parts
    os.close(fd)


def test_end_of_file_is_short_and_errors_are_negative(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    into = bytearray(10)
    ops = [
        (False, fd, 0, [memoryview(into)]),
        (False, fd, 3, [memoryview(bytearray(5))]),
        (True, fd, 0, [memoryview(b"x")]),
        (False, 9999, 0, [memoryview(bytearray(5))]),
    ]
    assert drain(engine.submit(ops)) == {0: 3, 1: 0, 2: -errno.EBADF, 3: -errno.EBADF}
    assert into[:3] == b"abc"
    os.close(fd)


def test_abandoned_batch_ends_before_its_memory_goes(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(1 << 20))
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    for _ in range(20):
        batch = engine.submit([(False, fd, 0, [memoryview(bytearray(1 << 16))]) for _ in range(20)])
        batch.next()
        del batch  # the only reference: it goes now, with its operations under way
    batch = engine.submit([(False, fd, 0, [memoryview(bytearray(10))])])
    batch.close()
    batch.close()
    assert batch.next() is None
    assert engine.submit([]).next() is None
    os.close(fd)


def test_wrong_operations_are_refused_before_anything_begins(engine: Any) -> None:
    with pytest.raises(BufferError):
        engine.submit([(False, 0, 0, [memoryview(b"read-only")])])
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.submit([])


@pytest.mark.parametrize("depth", [0, -1, 5000])
def test_depth_out_of_range_is_refused(native: ModuleType, depth: int) -> None:
    module = io_twin if native.__name__.endswith("twin") else native
    for opener in (module.open_pool, module.open_uring):
        with pytest.raises(ValueError, match="depth"):
            opener(depth)


def test_threads_share_an_engine(engine: Any, tmp_path: Path) -> None:
    data = os.urandom(1 << 16)
    (tmp_path / "f").write_bytes(data)
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    wrong: list[int] = []

    def read() -> None:
        for _ in range(30):
            into = [bytearray(4096) for _ in range(16)]
            drain(
                engine.submit([(False, fd, i * 4096, [memoryview(b)]) for i, b in enumerate(into)])
            )
            if b"".join(into) != data:
                wrong.append(1)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert wrong == []
    os.close(fd)
