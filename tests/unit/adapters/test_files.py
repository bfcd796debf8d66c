"""A shared folder: crashes, leases, several collectors, what a mount may do."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvist.adapters import files as files_module
from kvist.adapters.collecting import LOCK_LEASE_S, CollectLock
from kvist.adapters.files import FilesAdapter
from kvist.adapters.protocol import NewObject, Put, Wanted
from kvist.core.errors import TierError, TierFullError, VersionError
from kvist.testing.adapter_suite import (
    OBJECT_BYTES,
    all_names,
    fetch,
    new_object,
    probe,
    run_threads,
    suite_name,
    suite_object,
)

OLD_S = 100_000.0

WRITER = """
import sys
from pathlib import Path
from kvist.adapters.files import FilesAdapter
from kvist.testing.adapter_suite import new_object
adapter = FilesAdapter(Path(sys.argv[1]))
print("ready", flush=True)
for n in range(1_000_000):
    adapter.put([new_object(n % 500, 300_000)])
"""

COLLECTOR = """
import sys
from pathlib import Path
from kvist.adapters.files import FilesAdapter
from kvist.core.errors import TierFullError
from kvist.testing.adapter_suite import fetch, new_object, suite_object
root, first, cap = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
adapter = FilesAdapter(root, capacity_bytes=cap, grace_s=0.2)
full = 0
for n in range(first, first + 400):
    try:
        adapter.put([new_object(n)])
    except TierFullError:
        full += 1
    data = fetch(adapter, n)
    assert data is None or data == suite_object(n), "a wrong byte"
print("full", full)
"""


def object_files(root: Path) -> list[Path]:
    return [p for p in (root / "objects").rglob("*") if p.is_file()]


def age(path: Path, age_s: float = OLD_S) -> None:
    """As if the file had been written, and never read since, so long ago."""
    then = time.time() - age_s
    os.utime(path, (then, then))


def test_a_writer_that_is_killed_leaves_whole_objects_only(tmp_path: Path) -> None:
    line = [sys.executable, "-c", WRITER, str(tmp_path)]
    for _ in range(3):
        with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
    adapter = FilesAdapter(tmp_path)
    names = all_names(adapter)
    assert names
    numbers = {suite_name(i): i for i in range(500)}
    for name in names:
        assert fetch(adapter, numbers[name], 300_000) == suite_object(numbers[name], 300_000)


def test_what_crashes_left_is_swept_when_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = FilesAdapter(tmp_path, capacity_bytes=1 << 20)
    orphan = tmp_path / "tmp" / "crashed-0"
    orphan.write_bytes(b"half")
    adapter.put([new_object(1)])
    assert orphan.exists()
    monkeypatch.setattr("kvist.adapters.collecting._ORPHAN_S", -1.0)
    later = FilesAdapter(tmp_path, capacity_bytes=1 << 20)
    later.put([new_object(2)])
    assert not orphan.exists()


def test_three_hosts_that_collect_at_once_keep_the_cap_and_whole_objects(tmp_path: Path) -> None:
    cap = 64 * OBJECT_BYTES
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", COLLECTOR, str(tmp_path), str(first), str(cap)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for first in (0, 200, 1000)
    ]
    for host in hosts:
        out, err = host.communicate(timeout=120)
        assert host.returncode == 0, err
        assert out.startswith("full")
    adapter = FilesAdapter(tmp_path, capacity_bytes=cap, grace_s=0.0)
    adapter.put([new_object(5000)])
    used = sum(p.stat().st_size for p in object_files(tmp_path))
    assert 0 < used <= cap
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not (tmp_path / "collect.lock").exists()


def test_what_was_read_lately_is_not_collected(tmp_path: Path) -> None:
    cap = 16 * OBJECT_BYTES
    adapter = FilesAdapter(tmp_path, capacity_bytes=cap, grace_s=600.0)
    adapter.put([new_object(i) for i in range(14)])
    for path in object_files(tmp_path):
        age(path)
    assert fetch(adapter, 3) == suite_object(3)  # renews its lease
    report = adapter.put([new_object(i) for i in range(100, 104)])
    assert suite_name(3) not in report.evicted
    assert 0 < len(report.evicted) < 14
    assert probe(adapter, [3, 100, 103]) == [True] * 3


def test_a_folder_in_use_is_full_and_loses_nothing(tmp_path: Path) -> None:
    cap = 8 * OBJECT_BYTES
    adapter = FilesAdapter(tmp_path, capacity_bytes=cap, grace_s=600.0)
    adapter.put([new_object(i) for i in range(8)])
    with pytest.raises(TierFullError):
        adapter.put([new_object(9)])
    assert probe(adapter, [*range(8), 9]) == [True] * 8 + [False]


def test_a_lease_renewed_between_look_and_removal_saves_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector has read the folder; a reader comes before the file is removed."""
    adapter = FilesAdapter(tmp_path, capacity_bytes=8 * OBJECT_BYTES, grace_s=600.0)
    adapter.put([new_object(i) for i in range(8)])
    for path in object_files(tmp_path):
        age(path)
    reader = FilesAdapter(tmp_path)
    rename = Path.rename
    read: list[bytes | None] = []

    def late(self: Path, target: Path) -> Path:
        if not read and "objects" in self.parts:
            number = next(i for i in range(8) if suite_name(i).endswith(self.name))
            read.append(fetch(reader, number))
            read.append(str(number).encode())
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    report = adapter.put([new_object(20)])
    number = int(read[1] or b"")
    assert read[0] == suite_object(number)
    assert suite_name(number) not in report.evicted
    assert probe(adapter, [number]) == [True]


def test_a_lock_that_nobody_renews_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "collect.lock"
    one, two, three = (CollectLock(path, tmp_path, time.time) for _ in range(3))
    assert one.take()
    assert not two.take()
    age(path, LOCK_LEASE_S + 10)
    assert two.take()
    assert not one.renew()
    one.release()  # no longer its own
    assert two.renew()
    assert not three.take()
    two.release()
    assert three.take()
    three.release()
    assert list(tmp_path.iterdir()) == []


def test_a_fresh_lock_moved_aside_by_mistake_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts see the same stale lock; the first has a new one when the second acts."""
    path = tmp_path / "collect.lock"
    stale, first, second = (CollectLock(path, tmp_path, time.time) for _ in range(3))
    assert stale.take()
    age(path, LOCK_LEASE_S + 10)
    monkeypatch.setattr(second, "_is_stale", lambda: first.take() or True)
    assert not second.take()
    assert first.renew()


def test_a_mount_without_hard_links_takes_whole_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(files_module.os, "link", refuse)
    adapter = FilesAdapter(tmp_path)
    assert adapter.put([new_object(1)]).outcomes == (Put.STORED,)
    assert adapter.put([new_object(1)]).outcomes == (Put.PRESENT,)
    assert fetch(adapter, 1) == suite_object(1)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_link_whose_answer_was_lost_counts_as_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS repeats a call whose answer was lost, and the repetition finds the name taken."""
    link = os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    adapter = FilesAdapter(tmp_path)
    adapter.put([new_object(0)])
    (tmp_path / "objects" / "aa").mkdir(exist_ok=True)
    monkeypatch.setattr(files_module.os, "link", twice)
    assert adapter.put([new_object(1)]).outcomes == (Put.STORED,)
    assert fetch(adapter, 1) == suite_object(1)


@pytest.mark.parametrize(("code", "kind"), [(errno.EIO, TierError), (errno.ENOSPC, TierFullError)])
def test_faults_of_the_mount_are_errors_of_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[TierError]
) -> None:
    adapter = FilesAdapter(tmp_path)

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files_module.os, "writev", fail)
    with pytest.raises(kind):
        adapter.put([new_object(1)])
    monkeypatch.undo()
    assert probe(adapter, [1]) == [False]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_file_that_vanishes_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS another host's removal shows as a stale handle in the middle of a read."""
    adapter = FilesAdapter(tmp_path)
    adapter.put([new_object(1)])

    def stale(*_: object) -> int:
        raise OSError(errno.ESTALE, "stale file handle")

    monkeypatch.setattr(files_module.os, "preadv", stale)
    assert fetch(adapter, 1) is None


def test_a_folder_of_a_newer_kvist_is_left_alone(tmp_path: Path) -> None:
    FilesAdapter(tmp_path).close()
    (tmp_path / "format").write_bytes(b"kvist-files 2\n")
    with pytest.raises(VersionError, match="kvist-files 2"):
        FilesAdapter(tmp_path)


def test_files_and_folders_are_for_their_owner_only(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    FilesAdapter(root).put([new_object(1)])
    assert all(p.stat().st_mode & 0o077 == 0 for p in [root, *root.rglob("*")])


def test_a_symlink_in_place_of_an_object_is_not_followed(tmp_path: Path) -> None:
    root, secret = tmp_path / "shared", tmp_path / "secret"
    adapter = FilesAdapter(root)
    adapter.put([new_object(1)])
    secret.write_bytes(suite_object(1))
    (path,) = object_files(root)
    path.unlink()
    path.symlink_to(secret)
    with pytest.raises(TierError):
        adapter.get([Wanted(suite_name(1))])


def test_listing_survives_folders_that_come_and_go(tmp_path: Path) -> None:
    adapter = FilesAdapter(tmp_path)
    adapter.put([new_object(i, 10) for i in range(40)])
    wrong: list[str] = []
    kept = {suite_name(i) for i in range(20)}

    def churn() -> None:
        for n in range(30):
            adapter.put([new_object(100 + n, 10)])
            adapter.delete([suite_name(20 + n % 20)])

    def look() -> None:
        for _ in range(5):
            wrong.extend(kept.difference(all_names(adapter, "aa/", limit=7)))

    run_threads([churn, look])
    assert wrong == []


def test_short_names_have_places_of_their_own(tmp_path: Path) -> None:
    adapter = FilesAdapter(tmp_path)
    names = ["a", "ab", "abc", "a/b", "a/bc/abc", "b.c", "0-1"]
    adapter.put([NewObject(n, (memoryview(n.encode()),)) for n in names])
    assert sorted(all_names(adapter, limit=1)) == sorted(names)
    for name in names:
        out = memoryview(bytearray(len(name)))
        adapter.get([Wanted(name, (out,))])
        assert bytes(out).decode() == name


def test_threads_that_make_room_do_it_one_at_a_time(tmp_path: Path) -> None:
    adapter = FilesAdapter(tmp_path, capacity_bytes=32 * OBJECT_BYTES, grace_s=0.0)
    barrier = threading.Barrier(3)

    def write(first: int) -> None:
        barrier.wait(10)
        for n in range(first, first + 60):
            adapter.put([new_object(n)])

    run_threads([lambda f=f: write(f) for f in (0, 100, 200)])
    assert sum(p.stat().st_size for p in object_files(tmp_path)) <= 34 * OBJECT_BYTES
