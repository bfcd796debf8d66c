"""Recordings: hashes and lengths only, bounded, read back as they were, harmless to the engine."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from kvist.connectors.recorder import TraceRecorder
from kvist.core.errors import FormatError, VersionError
from kvist.core.hints import Finish
from kvist.sim.formats import read_trace

GOLDEN = """\
{"kvist_recording":1,"block_tokens":128,"model":"Llama-3-8B"}
{"timestamp":1500,"input_length":300,"output_length":9,"hash_ids":[5,8,2],"session":"a","cls":0}
{"timestamp":2500,"input_length":130,"output_length":null,"hash_ids":[5,9],"session":"","cls":2}
"""


def _keys(*names: str) -> list[bytes]:
    return [name.encode().ljust(32, b".") for name in names]


def _recorded(path: Path, block_tokens: int = 128) -> TraceRecorder:
    recorder = TraceRecorder(path, block_tokens, "Llama-3-8B")
    recorder.record(1.5, _keys("a", "b"), 300, 9, Finish.TOOL_USE, "user-7")
    recorder.record(2.5, _keys("a", "b"), 260, None, Finish.UNKNOWN, "")
    recorder.close()
    return recorder


def test_version_one_of_the_format_is_read_for_ever(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(GOLDEN)
    trace = read_trace(tmp_path / "r.jsonl")
    first, second = trace.requests
    assert (trace.block_tokens, trace.unique_blocks) == (128, 4)
    assert (first.time_s, first.keys) == (1.5, (b"5", b"8", b"2"))
    assert (first.finish, first.session) == (Finish.TOOL_USE, "a")
    assert (second.output_tokens, second.finish) == (None, Finish.UNKNOWN)


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    recorder = _recorded(tmp_path / "r.jsonl")
    assert (recorder.recorded, recorder.dropped) == (2, 0)
    first, second = read_trace(tmp_path / "r.jsonl").requests
    assert (first.time_s, first.input_tokens, first.output_tokens) == (1.5, 300, 9)
    assert len(first.keys) == len(second.keys) == 3  # two full blocks and a partial one
    assert first.keys[:2] == second.keys[:2]
    assert first.keys[2] != second.keys[2]


def test_small_blocks_of_the_engine_are_joined(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "r.jsonl", 16, "m")
    keys = _keys(*(str(i) for i in range(20)))
    recorder.record(0.0, keys, 330, 1, Finish.UNKNOWN, "")
    recorder.record(1.0, keys, 330, 1, Finish.UNKNOWN, "")
    recorder.record(2.0, [*keys[:16], *_keys("x", "y")], 290, 1, Finish.UNKNOWN, "")
    recorder.close()
    trace = read_trace(tmp_path / "r.jsonl")
    one, same, other = (request.keys for request in trace.requests)
    assert trace.block_tokens == 128
    assert len(one) == 3
    assert one == same
    assert one[:2] == other[:2]
    assert one[2] != other[2]


def test_a_file_holds_neither_text_nor_keys_nor_sessions(tmp_path: Path) -> None:
    _recorded(tmp_path / "r.jsonl")
    content = (tmp_path / "r.jsonl").read_text()
    assert "user-7" not in content
    ids = json.loads(content.splitlines()[1])["hash_ids"]
    assert int.from_bytes(_keys("a")[0][:8], "little") not in ids
    assert all(0 <= block_id < 2**53 for block_id in ids)
    assert (tmp_path / "r.jsonl").stat().st_mode & 0o077 == 0


def test_two_recordings_cannot_be_joined(tmp_path: Path) -> None:
    for name in ("r.jsonl", "s.jsonl"):
        _recorded(tmp_path / name)
    one, two = (
        json.loads((tmp_path / name).read_text().splitlines()[1]) for name in ("r.jsonl", "s.jsonl")
    )
    assert not set(one["hash_ids"]) & set(two["hash_ids"])
    assert one["session"] != two["session"]


def test_a_full_file_becomes_number_one_and_both_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    recorder = TraceRecorder(path, 128, "m", max_bytes=100_000)
    for n in range(2_000):
        recorder.record(float(n), _keys("a", str(n)), 300, 9, Finish.UNKNOWN, "")
    recorder.close()
    both = (path, tmp_path / "r.jsonl.1")
    assert all(file.stat().st_size <= 100_000 for file in both)
    assert sum(len(read_trace(file).requests) for file in both) <= 2_000
    assert read_trace(path).requests[-1].time_s == 1999.0


def test_a_new_recorder_keeps_the_old_file_as_number_one(tmp_path: Path) -> None:
    _recorded(tmp_path / "r.jsonl")
    before = (tmp_path / "r.jsonl").read_bytes()
    _recorded(tmp_path / "r.jsonl")
    assert (tmp_path / "r.jsonl.1").read_bytes() == before
    assert len(read_trace(tmp_path / "r.jsonl").requests) == 2


def test_a_disk_that_cannot_be_written_drops_and_counts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    recorder = _recorded(tmp_path / "file" / "r.jsonl")
    assert (recorder.recorded, recorder.dropped) == (0, 2)


def test_a_closed_recorder_drops_and_counts(tmp_path: Path) -> None:
    recorder = _recorded(tmp_path / "r.jsonl")
    recorder.record(3.0, _keys("a"), 128, 1, Finish.UNKNOWN, "")
    assert recorder.dropped == 1


def test_threads_may_record_at_once(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "r.jsonl", 128, "m")

    def work(thread: int) -> None:
        for n in range(100):
            recorder.record(float(n), _keys(f"{thread}"), 128, 1, Finish.UNKNOWN, "")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    recorder.close()
    assert recorder.recorded + recorder.dropped == 400
    assert len(read_trace(tmp_path / "r.jsonl").requests) == recorder.recorded


def test_a_torn_last_line_is_left_out_and_a_torn_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(GOLDEN[:-30])
    assert len(read_trace(path).requests) == 1
    lines = GOLDEN.splitlines()
    path.write_text("\n".join([lines[0], lines[1][:40], lines[2]]))
    with pytest.raises(FormatError, match="line 2"):
        read_trace(path)


@pytest.mark.parametrize(
    ("header", "kind", "named"),
    [
        ('{"kvist_recording":2,"block_tokens":128}', VersionError, "version 2"),
        ('{"kvist_recording":1,"block_tokens":0}', FormatError, "block_tokens"),
        ('{"kvist_recording":1}', FormatError, "block_tokens"),
    ],
)
def test_a_bad_header_is_named(
    tmp_path: Path, header: str, kind: type[FormatError], named: str
) -> None:
    (tmp_path / "r.jsonl").write_text(header + "\n")
    with pytest.raises(kind, match=named):
        read_trace(tmp_path / "r.jsonl")
