"""The codec benchmark measures every chain on the same blocks, and shows what it measured."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from kvist.bench.codec.__main__ import CodecResult, main, show
from kvist.bench.codec.measure import COPY, Rate, measure
from kvist.bench.codec.real_kv import default_text
from kvist.bench.machine import describe_machine
from kvist.codec.cachegen.table import TableShape
from kvist.codec.chain import CODECS, TABLED
from kvist.core.layout import BlockLayout
from kvist.testing.codec_suite import suite_values
from kvist.testing.made_up_kv import made_up_block, made_up_table

LAYOUT = BlockLayout(2, 2, 32, 64, "bfloat16")
BLOCKS = [suite_values(LAYOUT, "channels", seed) for seed in range(3)]


def result() -> CodecResult:
    return CodecResult(
        machine=describe_machine(),
        native=True,
        model="none",
        block_tokens=LAYOUT.block_tokens,
        block_bytes=LAYOUT.block_bytes,
        blocks=len(BLOCKS),
        rounds=2,
        codecs=measure(LAYOUT, BLOCKS, rounds=2),
    )


def test_every_codec_is_measured_beside_a_copy() -> None:
    found = {row.name: row for row in result().codecs}
    assert next(iter(found)) == COPY
    assert set(CODECS) <= set(found)
    assert found[COPY].ratio == 1
    assert found["int4"].ratio > found["int8"].ratio > found["lossless"].ratio > 1
    for row in found.values():
        for rate in (row.encode, row.decode):
            assert 0 < rate.least_mb_s <= rate.median_mb_s <= rate.most_mb_s


def test_cachegen_is_measured_where_there_is_a_table() -> None:
    table = made_up_table(TableShape.of(LAYOUT))
    blocks = [made_up_block(LAYOUT, seed=seed) for seed in range(2)]
    found = {row.name: row for row in measure(LAYOUT, blocks, rounds=1, table=table)}
    assert set(TABLED) <= set(found)
    assert not found["cachegen-1"].exact


def test_a_rate_leaves_the_first_round_out() -> None:
    rate = Rate.of([100.0, 1.0, 2.0, 4.0], 8_000_000)
    assert (rate.median_mb_s, rate.least_mb_s, rate.most_mb_s) == (4.0, 2.0, 8.0)


def test_what_was_measured_is_shown_and_survives_json() -> None:
    found = result()
    screen = io.StringIO()
    show(found, Console(file=screen, width=120))
    assert all(row.name in screen.getvalue() for row in found.codecs)
    assert msgspec.json.decode(msgspec.json.encode(found), type=CodecResult) == found


def test_a_text_that_is_not_there_is_an_error_and_one_is_always_at_hand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--texts", "/nonexistent/text"]) == 2
    assert "No such file" in capsys.readouterr().err
    assert len(default_text()) > 10_000
