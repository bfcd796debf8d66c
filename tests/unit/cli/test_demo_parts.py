"""The demo's decisions: what counts as the same answer, what came from where, what it says."""

from __future__ import annotations

from kvist.cli.demo.client import parse_reused
from kvist.cli.demo.prompt import Prompt
from kvist.cli.demo.rows import Answer, Case, as_json, rows_of, summary
from kvist.cli.serve_checks import option_value

PAGE = """
# HELP vllm:prefix_cache_hits_total Prefix cache hits
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 128.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 999.0
kvist_tokens_loaded_total{engine="0",model_name="m",tier="ssd"} 4224.0
kvist_tokens_loaded_total{engine="0",model_name="m",tier="dram"} 1.28e+02
kvist_tokens_loaded_created{engine="0",model_name="m",tier="ssd"} 1.7e+09
"""


def _answer(ttft_s: float, *ids: int, **tiers: int) -> tuple[str, Answer]:
    return "vllm", Answer(ttft_s, 1000, tiers, ids)


def test_reused_tokens_are_read_by_tier_from_the_metrics_page() -> None:
    assert parse_reused(PAGE) == {"hbm": 128, "ssd": 4224, "dram": 128}


def test_rows_stand_in_order_and_compare_with_the_cold_one() -> None:
    rows = rows_of(
        {
            Case.COLD: _answer(4.0, 1, 2),
            Case.TRANSFORMERS: _answer(2.0, 1, 3, ssd=512),
            Case.RESTART: _answer(0.5, 1, 2, ssd=896),
        }
    )
    assert [row.case for row in rows] == [Case.COLD, Case.RESTART, Case.TRANSFORMERS]
    assert [row.speedup for row in rows] == [1.0, 8.0, 2.0]
    assert [row.identical for row in rows] == [True, True, False]
    assert [row.computed_tokens for row in rows] == [1000, 104, 488]
    assert "transformers" in summary(rows)


def test_no_answer_at_all_is_not_the_same_answer() -> None:
    assert not rows_of({Case.COLD: _answer(1.0)})[0].identical


def test_the_summary_says_what_the_restart_saved() -> None:
    same = {Case.COLD: _answer(4.0, 1), Case.RESTART: _answer(0.5, 1, ssd=896)}
    assert "0.50 s in place of 4.00 s, because 896 of 1,000" in summary(rows_of(same))
    nothing = {Case.COLD: _answer(4.0, 1), Case.RESTART: _answer(4.0, 1)}
    assert "nothing came from Kvist" in summary(rows_of(nothing))


def test_json_has_every_tier_and_what_was_computed() -> None:
    rows = rows_of({Case.COLD: _answer(4.0, 1, hbm=128)})
    assert as_json(rows, {"question": "?"}) == {
        "rows": [
            {
                "case": "cold",
                "engine": "vllm",
                "ttft_s": 4.0,
                "prompt_tokens": 1000,
                "tokens_by_tier": {"hbm": 128, "dram": 0, "ssd": 0, "computed": 872},
                "speedup": 1.0,
                "identical": True,
            }
        ],
        "question": "?",
    }


def test_an_answer_ends_before_the_end_token() -> None:
    prompt = Prompt((1, 2), "?", end_id=9, tokenizer=None)
    assert prompt.answer_ids([4, 5, 9, 6]) == (4, 5)
    assert prompt.answer_ids([4, 5]) == (4, 5)


def test_an_option_of_vllm_is_found_in_every_spelling() -> None:
    assert option_value(["--block-size", "64"], "--block-size") == "64"
    assert option_value(["--block_size=32", "-x"], "--block-size") == "32"
    assert option_value(["--block-size"], "--block-size") == ""
    assert option_value(["--port", "1"], "--block-size") is None
