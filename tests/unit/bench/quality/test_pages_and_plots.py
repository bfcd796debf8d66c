"""`page.py` and `plot.py`: a result as Markdown and as a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kvist.bench.quality.page import page
from kvist.bench.quality.plot import draw, frontier
from kvist.bench.quality.samples import BlendRow, CodecRow, Result, Settings, read
from kvist.bench.samples import Machine
from kvist.core.errors import ConfigError
from kvist.sim.plots import check_plot

SETTINGS = Settings(
    model="m|m",
    texts=["t"],
    contexts=2,
    context_tokens=64,
    follow_tokens=2,
    greedy_tokens=4,
    block_tokens=32,
    questions=1,
    answer_tokens=8,
)


def _row(name: str, stored: int, kl: float | None) -> CodecRow:
    return CodecRow(codec=name, raw_bytes=100, stored_bytes=stored, kl_nats_mean=kl)


ROWS = [
    _row("raw", 100, 0.0),
    _row("lossless", 70, 0.0),
    _row("int8", 52, 1e-4),
    _row("wasteful", 60, 1e-3),
    _row("int4", 30, 1e-2),
    CodecRow(codec="absent", fault="text 1: not here"),
]


def _result() -> Result:
    machine = Machine("a cpu", 2, 1 << 30, "6.1", "3.11", {"torch": "2"}, "abc", 0.0)
    return Result(
        started="now",
        machine=machine,
        settings=SETTINGS,
        codecs=ROWS,
        copy_mb_s=9000,
        implementation="python",
    )


def test_frontier_leaves_out_what_another_codec_beats_in_size_and_divergence() -> None:
    assert [row.codec for row in frontier(ROWS)] == ["lossless", "int8", "int4"]
    assert frontier([]) == []


def test_page_names_its_source_and_has_every_row_and_note() -> None:
    text = page(_result(), "bench/results/q.json")
    assert "`bench/results/q.json`" in text
    assert "| int8 | 52.0% | 0.0001 |" in text
    assert "| lossless | 70.0% | 0 |" in text
    assert "* absent: text 1: not here" in text
    assert "interrupted" in text
    assert "Python twins" in text
    assert "memcpy of the same blocks: 9,000 MB/s" in text


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="the extra `plot` is not installed"
)
@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_plot_is_drawn_whatever_rows_there_are(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"q{suffix}"
    draw(_result(), path)
    assert path.stat().st_size > 5000
    if suffix == ".svg":
        assert "int8" in path.read_text()
    empty = _result()
    empty.blend = [
        BlendRow(
            way=way,
            prompts=1,
            positions=2,
            computed_ratio=computed,
            kl_nats_mean=kl,
            kl_nats_p95=kl,
            kl_nats_answer=kl,
            top1_ratio=1,
            greedy_ratio=1,
        )
        for way, computed, kl in (("full", 1, 0.0), ("0", 0.1, 0.5), ("0.15", 0.2, 0.1))
    ]
    draw(empty, path)
    if suffix == ".svg":
        assert "share computed again" in path.read_text()
    assert "| 0.15 | 20.0% | 0.1 | 80.0% |" in page(empty, "f")
    empty.codecs = [CodecRow(codec="absent")]
    draw(empty, path)


def test_plot_of_another_kind_is_refused_beforehand(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither .png nor .svg"):
        check_plot(tmp_path / "q.gif")


def test_the_page_in_the_docs_shows_the_kept_result() -> None:
    root = Path(__file__).resolve().parents[4]
    kept = Path("bench/results/quality.json")
    if not (root / kept).exists():
        pytest.skip("no result is kept")
    assert (root / kept).stat().st_size < 100_000
    shown = (root / "docs" / "quality.md").read_text()
    assert shown == page(read(root / kept), str(kept)), (
        f"run `kvist quality --show {kept} --page docs/quality.md`"
    )
