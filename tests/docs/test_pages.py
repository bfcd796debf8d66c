"""The documentation is true: snippets run, generated pages are current, links lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvist.cli import docs_gen

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What a snippet may import and still run in a plain checkout; others are only compiled.
RUNNABLE = {"kvist"}
ENGINES = {"kvist.connectors", "kvist.bench", "kvist.assemble"}


def _snippets() -> list[tuple[str, str]]:
    return [
        (f"{page.relative_to(ROOT)}:{page.read_text()[: match.start()].count(chr(10)) + 1}", code)
        for page in PAGES
        for match in FENCE.finditer(page.read_text())
        for code in [match[2]]
    ]


def _runs_anywhere(code: str) -> bool:
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return bool(names) and all(
        name.split(".")[0] in RUNNABLE and ".".join(name.split(".")[:2]) not in ENGINES
        for name in names
    )


@pytest.mark.parametrize(("where", "code"), _snippets())
def test_python_snippets_run_or_compile(where: str, code: str) -> None:
    compiled = compile(code, where, "exec")
    if _runs_anywhere(code):
        exec(compiled, {"__name__": "__main__"})


@pytest.mark.parametrize("name", sorted(docs_gen.pages()))
def test_generated_pages_are_up_to_date(name: str) -> None:
    page = ROOT / "docs" / name
    assert page.read_text() == docs_gen.pages()[name], "run `make docs`"


def test_check_mode_writes_nothing_and_reports_stale_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert docs_gen.main(["--check", str(tmp_path)]) == 1
    assert list(tmp_path.iterdir()) == []
    assert "configuration.md is out of date" in capsys.readouterr().err
    assert docs_gen.main([str(tmp_path)]) == 0
    assert docs_gen.main(["--check", str(tmp_path)]) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_index_links_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {p.name for p in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {name for name in pages if f"({name})" not in index} == set()
