"""Every trace format from a small file, and one-line errors that name file, line and field."""

import gzip
import json
from pathlib import Path

import pytest

from kvist.core.errors import FormatError
from kvist.core.hints import Finish
from kvist.sim.formats import read_trace

MOONCAKE = {"timestamp": 1500, "input_length": 1000, "output_length": 9, "hash_ids": [1, 2]}


def _file(folder: Path, *records: object, name: str = "t.jsonl") -> Path:
    path = folder / name
    text = "\n".join(r if isinstance(r, str) else json.dumps(r) for r in records)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_mooncake_lines_are_read_with_their_options(tmp_path: Path, name: str) -> None:
    trace = read_trace(_file(tmp_path, MOONCAKE, MOONCAKE | {"session": 4, "cls": 0}, name=name))
    first, second = trace.requests
    assert (trace.block_tokens, trace.unique_blocks, trace.accesses_blocks) == (512, 2, 4)
    assert first.time_s == 1.5
    assert first.keys == second.keys
    assert (second.session, second.finish) == ("4", Finish.TOOL_USE)
    assert first.finish is Finish.UNKNOWN


def test_block_size_is_the_one_that_explains_the_ids(tmp_path: Path) -> None:
    record = {"timestamp": 0, "input_length": 130, "hash_ids": [1, 2, 3]}
    assert read_trace(_file(tmp_path, record)).block_tokens == 64


def test_bailian_timestamps_are_seconds(tmp_path: Path) -> None:
    record = {"chat_id": 3, "timestamp": 61.5, "input_length": 32, "hash_ids": [7, 8]}
    trace = read_trace(_file(tmp_path, record))
    assert (trace.requests[0].time_s, trace.block_tokens) == (61.5, 16)


def test_text_shares_the_blocks_of_a_common_prefix(tmp_path: Path) -> None:
    texts = ("a" * 600, "a" * 512 + "b" * 88)
    agent = [{"timestamp": 1e6 * n, "input": t} for n, t in enumerate(texts)]
    aibrix = [
        {"timestamp": 1000 * n, "requests": [{"prompt": t, "Output Length": 2}]}
        for n, t in enumerate(texts)
    ]
    tokens = [
        {"arrival_time_ns": 10**9 * n, "input_tok_ids": list(t.encode())[:150]}
        for n, t in enumerate(("a" * 150, "a" * 128 + "b" * 22))
    ]
    for records in (agent, aibrix, tokens):
        one, two = read_trace(_file(tmp_path, *records)).requests
        assert len(one.keys) == len(two.keys) == 3
        assert one.keys[:2] == two.keys[:2]
        assert one.keys[2] != two.keys[2]
        assert (one.time_s, two.time_s) == (0.0, 1.0)
        assert one.input_tokens == 150


def test_lengths_alone_make_new_blocks(tmp_path: Path) -> None:
    azure = _file(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.0319600,3180,8",
        name="a.csv",
    )
    trace = read_trace(azure)
    assert trace.unique_blocks == trace.accesses_blocks == 17
    assert trace.requests[1].time_s > trace.requests[0].time_s
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    burst = _file(tmp_path, header, "5,ChatGPT,472,18,490,Conversation log", name="b.csv")
    assert read_trace(burst).requests[0].output_tokens == 18
    header = "arrived_at,num_prefill_tokens,num_decode_tokens"
    vidur = _file(tmp_path, header, "4.314579,396,109", name="v.csv")
    assert read_trace(vidur).requests[0].input_tokens == 396


def test_ragpulse_components_become_chained_blocks(tmp_path: Path) -> None:
    for name, field, number, tokens in (
        ("1_sys_prompt.jsonl", "sys_prompt_id", 1, 100),
        ("2_passages.jsonl", "passage_id", 2, 50),
        ("3_history.jsonl", "history_id", 3, 10),
        ("4_user_input.jsonl", "user_input_id", 4, 5),
        ("5_web_search.jsonl", "web_search_id", 5, 5),
    ):
        _file(tmp_path, {field: number, "token_length": tokens}, name=name)
    record = {"timestamp": "82", "input_length": 1, "hash_ids": {"sys_prompt": [1]}}
    more = {"timestamp": "83", "input_length": 1, "hash_ids": {"sys_prompt": [1], "history": [3]}}
    one, two = read_trace(_file(tmp_path, record, more, name="0_trace.jsonl")).requests
    assert (one.input_tokens, two.input_tokens) == (100, 110)
    assert one.keys[0] == two.keys[0]
    assert one.keys[1] != two.keys[1]


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"timestamp": 0, "input_length": 5}, "hash_ids"),
        (MOONCAKE | {"hash_ids": [1, None]}, r"\$\.hash_ids\["),
        (MOONCAKE | {"input_length": "many"}, "input_length"),
        (MOONCAKE | {"input_length": -1}, "input_length"),
        (MOONCAKE | {"output_length": -1}, "output_length"),
        (MOONCAKE | {"cls": 9}, "cls"),
        ("{not json", "JSON"),
    ],
)
def test_a_bad_record_names_file_line_and_field(
    tmp_path: Path, record: object, complaint: str
) -> None:
    path = _file(tmp_path, MOONCAKE, record)
    with pytest.raises(FormatError, match=complaint) as caught:
        read_trace(path)
    assert f"{path}, line 2: " in str(caught.value)


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="known are"):
        read_trace(_file(tmp_path, "600,0,0,,0,0", name="rates.csv"))
    with pytest.raises(FormatError, match="empty"):
        read_trace(_file(tmp_path, name="none.jsonl"))
    damaged = tmp_path / "t.jsonl.gz"
    damaged.write_bytes(b"no gzip")
    with pytest.raises(FormatError, match="gzip"):
        read_trace(damaged)


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


@pytest.mark.parametrize(
    ("records", "number", "field"),
    [
        ([MOONCAKE | {"timestamp": -1}], 1, r"\$\.timestamp"),
        ([MOONCAKE | {"timestamp": 61_501}, MOONCAKE | {"timestamp": 1_500}], 2, r"\$\.timestamp"),
        ([{"timestamp": 99e6, "input": "a"}, {"timestamp": 1e6, "input": "a"}], 2, "timestamp"),
        ([{"timestamp": 99e3, "requests": []}, {"timestamp": 1, "requests": []}], 2, "timestamp"),
        (
            [
                {"arrival_time_ns": 99e9, "input_tok_ids": [1]},
                {"arrival_time_ns": 0, "input_tok_ids": [1]},
            ],
            2,
            "arrival_time_ns",
        ),
        ([AZURE, "5,100,1", "-5,100,1"], 3, "TIMESTAMP"),
        ([AZURE, "99,100,1", "5,100,1"], 3, "TIMESTAMP"),
        ([AZURE, "nan,100,1"], 2, "TIMESTAMP"),
        ([AZURE, "1,-100,1"], 2, "negative"),
    ],
    ids=str,
)
def test_negative_times_and_times_that_go_back_are_refused(
    tmp_path: Path, records: list[object], number: int, field: str
) -> None:
    path = _file(tmp_path, *records)
    with pytest.raises(FormatError, match=field) as caught:
        read_trace(path)
    assert f"{path}, line {number}: " in str(caught.value)


def test_neighbours_in_the_wrong_order_are_put_in_order(tmp_path: Path) -> None:
    """Servers log requests as they end; a minute back is an order, not a fault."""
    path = _file(tmp_path, MOONCAKE | {"timestamp": 61_500}, MOONCAKE | {"timestamp": 1_500})
    assert [request.time_s for request in read_trace(path).requests] == [1.5, 61.5]


def test_ragpulse_says_what_repeats_at_whatever_place(tmp_path: Path) -> None:
    for name, field, number, tokens in (
        ("1_sys_prompt.jsonl", "sys_prompt_id", 1, 100),
        ("2_passages.jsonl", "passage_id", 2, 50),
        ("3_history.jsonl", "history_id", 3, 10),
        ("4_user_input.jsonl", "user_input_id", 4, 5),
        ("5_web_search.jsonl", "web_search_id", 5, 5),
    ):
        _file(tmp_path, {field: number, "token_length": tokens}, name=name)
    record = {"timestamp": "82", "input_length": 1, "hash_ids": {"passages_ids": [2]}}
    more = {"timestamp": "83", "input_length": 1, "hash_ids": {"sys_prompt": [1]}}
    ids = {"sys_prompt": [1], "passages_ids": [2]}
    both = {"timestamp": "84", "input_length": 1, "hash_ids": ids}
    trace = read_trace(_file(tmp_path, record, more, both, name="0_trace.jsonl"))
    assert trace.repeated_tokens_ratio == 0.5  # 150 of 300


def test_ragpulse_weeks_follow_each_other_though_each_clock_starts_at_zero(tmp_path: Path) -> None:
    for name, field in (
        ("1_sys_prompt.jsonl", "sys_prompt_id"),
        ("2_passages.jsonl", "passage_id"),
        ("3_history.jsonl", "history_id"),
        ("4_user_input.jsonl", "user_input_id"),
        ("5_web_search.jsonl", "web_search_id"),
    ):
        _file(tmp_path, {field: 1, "token_length": 10}, name=name)
    records = [
        {"timestamp": time, "input_length": 1, "hash_ids": {"sys_prompt": [1]}}
        for time in ("82", "604453", "0", "27")
    ]
    trace = read_trace(_file(tmp_path, *records, name="0_trace.jsonl"))
    assert [request.time_s for request in trace.requests] == [82, 604453, 604453, 604480]
    late = _file(tmp_path, *records[:2], records[0] | {"timestamp": "9999"}, name="0_trace.jsonl")
    with pytest.raises(FormatError, match="line 3"):
        read_trace(late)
