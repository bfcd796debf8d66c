"""The source tree as the tests of the house rules read it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "kvist"
TESTS = ROOT / "tests"


@dataclass(frozen=True, slots=True)
class Module:
    """One Python file: its path from the root, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module


@cache
def modules(*folders: str) -> tuple[Module, ...]:
    """Every Python file below the folders (all that we write, if none is named)."""
    found = []
    for folder in folders or ("src", "tests", "scripts", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            found.append(Module(str(path.relative_to(ROOT)), text, ast.parse(text)))
    return tuple(found)


def called_name(node: ast.Call) -> str:
    """`time.sleep` for `time.sleep(1)`; empty for anything but dotted names."""
    return ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""


def imported_names(tree: ast.Module) -> set[str]:
    """Top-level names of the packages that a module imports, wherever the import stands."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names
