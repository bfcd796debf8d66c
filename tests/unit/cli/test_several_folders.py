"""`kvist du` and `kvist verify` look at every folder that the configuration names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvist.cli.main import main
from kvist.tiers.protocol import Payload
from kvist.tiers.ssd import FsyncMode, SsdTier

MIB = 1 << 20


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two folders with two blocks and one, and a third that is not there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVIST_STORE__SSD__PATH", raising=False)
    named = [tmp_path / name for name in ("a", "b", "gone")]
    for n, folder in enumerate(named[:2]):
        tier = SsdTier.open(
            folder, keyspace=b"\xaa" * 32, capacity_bytes=64 * MIB, fsync=FsyncMode.OFF
        )
        tier.put([Payload(bytes([n, i]) * 16, None, memoryview(b"x" * 5000)) for i in range(2 - n)])
        tier.close()
    lines = ["store:", "  ssd:", "    capacity: 64MiB", "    path:"]
    Path("kvist.yaml").write_text("\n".join([*lines, *(f"      - {p}" for p in named)]))
    return named


def test_du_adds_up_all_folders_and_names_those_that_are_missing(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["du", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["blocks"], shown["segments"], shown["foreign_files"]) == (3, 2, 0)
    assert shown["capacity_bytes"] == 2 * 64 * MIB
    assert shown["directories"] == [str(p) for p in folders[:2]]
    assert shown["missing"] == [str(folders[2])]
    assert main(["du"]) == 0
    out, err = capsys.readouterr()
    assert f"2 segments in {folders[0]}, {folders[1]}" in out
    assert f"{folders[2]} is not a folder" in err


def test_verify_finds_a_corrupt_frame_in_any_folder(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["frames_ok"] == 3
    (segment,) = folders[1].glob("*.kvs")
    data = bytearray(segment.read_bytes())
    data[2 * 4096 + 100] ^= 1
    segment.write_bytes(data)
    assert main(["verify"]) == 1
    out, err = capsys.readouterr()
    assert str(segment) in out
    assert out.splitlines()[-1] == "corrupt"
    assert f"{folders[2]} is not a folder" in err
    assert main(["verify", str(folders[0])]) == 0


def test_one_folder_by_name_leaves_the_others_alone(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["du", str(folders[1]), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["blocks"], shown["capacity_bytes"], shown["missing"]) == (1, None, [])
