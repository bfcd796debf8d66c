"""What the files around the code must say: no personal paths, no stale command, no missing knob."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

from source_tree import ROOT, modules

from kvist.config import knobs
from kvist.metrics import BY_NAME, METRICS, Kind

TEXT = {".py", ".md", ".toml", ".sh", ".yaml", ".yml", ".cpp", ".hpp", ".txt", ".cfg", ""}
SKIPPED = {".venv", ".git", "build", "dist", "shared", ".coverage"}
# A home, or a folder that exists on one machine only.
PERSONAL = re.compile(r"/(?:home|Users)/[a-z]|(?<![\w.])/work/")


def _texts() -> Iterator[tuple[str, str]]:
    def walk(folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            if path.is_symlink() or path.name in SKIPPED or path.name.endswith("_cache"):
                continue
            if path.is_dir():
                if not path.name.startswith((".hypothesis", "__pycache__", ".cache")):
                    yield from walk(path)
            elif path.suffix in TEXT:
                yield path

    for path in walk(ROOT):
        yield str(path.relative_to(ROOT)), path.read_text(errors="replace")


def test_no_file_names_a_personal_path() -> None:
    found = [
        f"{name}:{n}"
        for name, text in _texts()
        if name != "tests/tidy/test_project_files.py"
        for n, line in enumerate(text.splitlines(), 1)
        if PERSONAL.search(line)
    ]
    assert found == []


def test_every_knob_says_what_it_means() -> None:
    silent = [path for path, knob in knobs().items() if len(knob.description.split()) < 3]
    assert silent == []


def test_every_knob_is_read_somewhere() -> None:
    """A knob that nothing reads is a promise that nobody keeps."""
    readers = [m.text for m in modules("src") if not m.path.endswith("schema.py")]
    code = "\n".join(readers)
    dead = [p for p in knobs() if not re.search(rf"\.{p.rsplit('.', 1)[-1]}\b", code)]
    assert dead == []


def test_every_metric_in_the_code_is_declared() -> None:
    # Quoted, possibly with a label's value after a dot: "kvist_tokens_loaded_total.ssd".
    name = re.compile(r"[\"'](kvist_[a-z_]+_total)\b")
    used = {n for m in modules("src") for n in name.findall(m.text)}
    assert used <= set(BY_NAME)


def test_metric_names_follow_the_conventions_of_prometheus() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"kvist_[a-z_]+", metric.name)
        assert (metric.kind is Kind.COUNTER) == metric.name.endswith("_total")
        assert metric.description.endswith(".")


def test_every_make_target_that_the_docs_name_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    # In prose "make sure" is English: only code, in backticks or indented fences, is a command.
    named = {
        (page.name, target)
        for page in pages
        for target in re.findall(r"(?:`|^\s*\$?\s*)make ([a-z-]+)", page.read_text(), re.MULTILINE)
    }
    assert {(page, target) for page, target in named if target not in targets} == set()


def test_makefile_explains_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split())
    explained = set(re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE))
    assert phony == explained


def test_shell_scripts_parse_and_can_be_run() -> None:
    scripts = [ROOT / ".ci" / "run", *sorted((ROOT / "scripts").glob("*.sh"))]
    for script in scripts:
        text = script.read_text()
        assert text.startswith("#!/usr/bin/env bash\n")
        assert re.search(r"^set -[a-z]*e", text, re.MULTILINE), f"{script.name} ignores failures"
        assert script.stat().st_mode & 0o100, f"{script.name} is not executable"
        done = subprocess.run(["bash", "-n", script], capture_output=True, timeout=30)
        assert done.returncode == 0, done.stderr


def test_license_is_the_one_that_pyproject_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    license_text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in license_text
    assert "END OF TERMS AND CONDITIONS" in license_text


def test_changelog_has_the_current_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()
