"""The `kvist` command as users meet it: help, output, JSON, errors of one line, exit codes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvist.cli.main import COMMANDS, available, build_parser, main
from kvist.tiers.protocol import Payload
from kvist.tiers.ssd import FsyncMode, SsdTier

MIB = 1 << 20
BLOCK = bytes(range(256)) * 64
TIMEOUT_S = 60


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in [n for n in os.environ if n.startswith("KVIST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVIST_STORE__SSD__PATH", str(tmp_path / "cache"))
    monkeypatch.setenv("KVIST_STORE__SSD__CAPACITY", "64MiB")
    monkeypatch.setenv("KVIST_STORE__DRAM__CAPACITY", "16MiB")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A folder with seven blocks of keyspace aa… (one removed again) and two of keyspace bb…."""
    folder = tmp_path / "cache"
    for keyspace, count in ((b"\xaa", 7), (b"\xbb", 2)):
        tier = SsdTier.open(
            folder, keyspace=keyspace * 32, capacity_bytes=64 * MIB, fsync=FsyncMode.OFF
        )
        keys = [keyspace * 31 + bytes([i]) for i in range(count)]
        tier.put([Payload(key, None, memoryview(BLOCK)) for key in keys])
        if count == 7:
            tier.remove(keys[:1])
        tier.close()
    return folder


def _corrupt(folder: Path) -> Path:
    """Flips a bit in the middle of the first payload of the first segment."""
    segment = sorted(folder.glob("*.kvs"))[0]
    data = bytearray(segment.read_bytes())
    at = data.index(BLOCK) + 1000
    data[at] ^= 1
    segment.write_bytes(data)
    return segment


def _run(*args: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvist.cli.main", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, **kwargs)


def test_help_lists_every_command_and_imports_no_engine() -> None:
    code = (
        "import sys\n"
        "from kvist.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "heavy = {'torch', 'vllm', 'transformers', 'numpy', 'rich', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    for command in available():
        assert command.name in done.stdout
        assert command.summary in done.stdout


def _leaf_parsers() -> dict[str, object]:
    def walk(parser):
        nested = [a for a in parser._actions if hasattr(a, "choices") and a.nargs == "A..."]
        if not nested:
            yield parser.prog, parser
        for action in nested:
            for child in action.choices.values():
                yield from walk(child)

    return dict(walk(build_parser("*")))


@pytest.mark.parametrize("name", sorted(_leaf_parsers()))
def test_help_of_every_command_ends_in_an_example_that_parses(name: str) -> None:
    parser = _leaf_parsers()[name]
    last = parser.format_help().rstrip().splitlines()[-1].strip()
    words = shlex.split(last)
    assert words[0] == "kvist"
    assert build_parser("*").parse_args(words[1:]).command in {c.name for c in COMMANDS}


@pytest.mark.parametrize("name", sorted(_leaf_parsers()))
def test_every_command_speaks_json_when_asked(name: str) -> None:
    options = {o for a in _leaf_parsers()[name]._actions for o in a.option_strings}
    if name == "kvist serve":
        pytest.skip("what it runs prints for itself")
    assert "--json" in options


def test_show_says_where_each_value_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    Path("kvist.yaml").write_text("block_tokens: 64")
    assert main(["config", "show", "--set", "store.io_threads=3", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["block_tokens"] == 64
    assert shown["origins"]["block_tokens"] == "kvist.yaml"
    assert shown["origins"]["store.io_threads"] == "--set"
    assert main(["config", "show"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["block_tokens", "64", "kvist.yaml"] in lines
    assert ["store.dram.capacity", "16MiB", "KVIST_STORE__DRAM__CAPACITY"] in lines
    assert ["events.enabled", "true", "default"] in lines


def test_check_passes_where_kvist_would_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "check"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "ok"
    assert main(["config", "check", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is True
    assert shown["ssd_path"] == str(tmp_path / "cache")
    assert (shown["dram_bytes"], shown["ssd_bytes"]) == (16 * MIB, 64 * MIB)


def test_check_names_each_problem_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    bad = ["config", "check", "--set", "store.ssd.capacity=1MiB"]
    assert main(bad) == 1
    out = capsys.readouterr().out
    assert out.startswith("$.store.ssd.capacity (--set): 1MiB is below 64MiB; ")
    assert main([*bad, "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is False
    assert shown["problems"][0]["path"] == "store.ssd.capacity"


def test_du_counts_live_blocks_by_keyspace(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["du", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(k["keyspace"], k["blocks"]) for k in shown["keyspaces"]] == [
        ("aa" * 32, 6),
        ("bb" * 32, 2),
    ]
    assert shown["blocks"] == 8
    frame_bytes = 4096 + len(BLOCK)
    assert shown["keyspaces"][1]["bytes"] == 2 * frame_bytes
    assert shown["keyspaces"][1]["raw_bytes"] == 2 * len(BLOCK)
    assert shown["used_bytes"] >= 9 * frame_bytes
    assert shown["capacity_bytes"] == 64 * MIB
    assert main(["du", str(cache)]) == 0
    out = capsys.readouterr().out
    assert "aaaaaaaaaaaa" in out
    assert "cap" not in out.split()  # the cap of a folder named by hand is not known


def test_du_works_while_the_cache_is_in_use(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = SsdTier.open(cache, keyspace=b"\xcc" * 32, capacity_bytes=64 * MIB, fsync=FsyncMode.OFF)
    try:
        tier.put([Payload(b"\xcc" * 32, None, memoryview(BLOCK))])
        assert main(["du", "--json"]) == 0
    finally:
        tier.close()
    assert json.loads(capsys.readouterr().out)["blocks"] == 9


def test_verify_is_ok_on_a_sound_cache(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "ok"
    assert main(["verify", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["ok"], shown["corrupt_frames"]) == (True, 0)
    assert shown["frames_ok"] == 10  # nine blocks and a tombstone


def test_verify_names_the_corrupt_segment_and_exits_with_1(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    segment = _corrupt(cache)
    assert main(["verify", str(cache)]) == 1
    out = capsys.readouterr().out
    assert segment.name in out
    assert out.splitlines()[-1] == "corrupt"
    assert main(["verify", str(cache), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["ok"], shown["corrupt_frames"]) == (False, 1)
    bad = [s["segment"] for s in shown["segments"] if s["corrupt_frames"]]
    assert bad == [segment.name]


def test_du_and_verify_see_the_shards_below_a_folder(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = cache / "dp1"
    tier = SsdTier.open(shard, keyspace=b"\xaa" * 32, capacity_bytes=64 * MIB, fsync=FsyncMode.OFF)
    tier.put([Payload(b"\xdd" * 32, None, memoryview(BLOCK))])
    tier.close()
    assert main(["du", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["blocks"], shown["keyspaces"][0]["blocks"]) == (9, 7)
    assert shown["foreign_files"] == 0
    _corrupt(shard)
    assert main(["verify"]) == 1
    assert "dp1/segment-" in capsys.readouterr().out


def test_verify_changes_nothing(cache: Path) -> None:
    _corrupt(cache)
    before = {p.name: p.read_bytes() for p in cache.iterdir()}
    assert main(["verify"]) == 1
    assert main(["du"]) == 0
    assert {p.name: p.read_bytes() for p in cache.iterdir()} == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["du", "/no/such/folder"], "DIR: /no/such/folder is not a folder; give the folder of"),
        (["verify"], "$.store.ssd.path (KVIST_STORE__SSD__PATH): "),
        (["config", "show", "--set", "blok_tokens=1"], "did you mean block_tokens?"),
        (["config", "show", "--config", "gone.yaml"], "--config: cannot read gone.yaml"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["du", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["config"], "the following arguments are required: COMMAND"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_errors_are_one_line_and_exit_with_2(args: list[str], message: str) -> None:
    done = _run(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kvist: error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_unreadable_folder_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "cache").mkdir()
    monkeypatch.setattr("os.scandir", refuse)
    assert main(["du"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("kvist: error: ")
    assert "Permission denied" in err
    assert "Errno" not in err


def test_ctrl_c_exits_with_130_and_no_traceback() -> None:
    code = (
        "import os, signal, sys\n"
        "from kvist.cli import config_cmd, main\n"
        "config_cmd.run = lambda args: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(main.main(['config', 'show']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 128 + signal.SIGINT
    assert "Traceback" not in done.stderr


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = f"{shlex.quote(sys.executable)} -m kvist.cli.main config show --json | true"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.stderr == ""


def test_version_is_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("kvist ")
