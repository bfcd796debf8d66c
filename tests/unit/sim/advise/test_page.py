"""The page stands alone: well formed, no script, nothing from the network, plots with words."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from deployments import question

from kvist.sim.advise.advice import Advice
from kvist.sim.advise.page import page
from kvist.sim.advise.plots import Axis, Mark, Series, line_chart
from kvist.sim.advise.run import advise
from kvist.sim.advise.tables import bar, grids, seconds, size
from kvist.sim.synthetic import synthetic

_VOID = {"meta", "path", "circle", "br"}


@pytest.fixture(scope="module")
def advice() -> Advice:
    return advise(synthetic("chat", 200, 2.0, 0), question())


class _Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag


def test_page_is_balanced_and_loads_nothing(advice: Advice) -> None:
    text = page(advice)
    found = _Balance()
    found.feed(text)
    assert found.open == found.links == []
    assert "<script" not in text
    assert "url(" not in text
    assert "prefers-color-scheme" in text
    assert text.count("<svg") == 3


def test_every_plot_has_a_title_and_its_words(advice: Advice) -> None:
    for svg in re.findall(r"<svg.*?</svg>", page(advice), re.DOTALL):
        tree = ElementTree.fromstring(svg)
        assert tree.get("role") == "img"
        assert tree.findtext("title")
        assert len(tree.findtext("desc") or "") > 40


def test_every_table_row_has_a_cell_for_each_column(advice: Advice) -> None:
    for grid in grids(advice):
        assert grid.rows
        assert {len(row) for row in grid.rows} == {len(grid.columns)}


def test_advice_is_json_without_infinities(advice: Advice) -> None:
    found = json.loads(json.dumps(advice.to_dict(), allow_nan=False))
    assert found["verdict"] == advice.verdict.value
    assert len(found["assumptions"]) > 10
    assert found["tiers"][0]["medium"] == "dram"


def test_names_from_a_trace_cannot_break_the_page() -> None:
    trace = synthetic("rag", 50, 1.0, 0)
    hostile = type(trace)("<script>&\"'", *(getattr(trace, n) for n in trace.__slots__[1:]))
    text = page(advise(hostile, question()))
    assert "<script" not in text


def test_a_chart_of_one_point_and_of_none_is_still_a_chart() -> None:
    plain = Axis("x", str)
    for series in ([], [Series("a", [(1.0, 1.0)], 0)], [Series("a", [], 0)]):
        text = line_chart("t", "words", series, Axis("x", str, log=True), plain, [Mark("m", 2.0)])
        ElementTree.fromstring(text)


def test_figures_for_people_carry_three_digits_and_a_unit() -> None:
    assert [size(v) for v in (5e12, 2.5e9, 3e6, 12)] == ["5 TB", "2.5 GB", "3 MB", "12 B"]
    assert [seconds(v) for v in (0.0123, 1.5, 90, 600, 9000, 200_000)] == [
        "12.3 ms", "1.5 s", "90 s", "10 min", "2.5 h", "2.31 d",
    ]  # fmt: skip
    assert bar(0.5, 4) == "██  "
    assert bar(1.0, 4) == "████"
    assert bar(0.03, 4) == "▏   "
