"""The house rules that a machine can check. A limit is raised by arguing, not by editing here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from source_tree import ROOT, SRC, called_name, imported_names, modules

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "v2"}
# Process edges: an error of any kind there is counted or reported, and the process goes on.
BROAD_EXCEPT_ALLOWED = {"src/kvist/connectors/fallback.py"}
# Modules that wait for a process or a device that offers nothing to wait on.
SLEEP_ALLOWED = {  # another process's lock on a file
    "src/kvist/bench/smollm2.py",
    "src/kvist/node/place.py",
}
# Their `acquire` answers at once: a breaker, not a lock.
NEVER_WAITS = {"src/kvist/store/link.py", "src/kvist/node/peers/member.py"}
# What can run code while it reads data.
UNSERIALISERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal"}


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_files_have_at_most_400_lines() -> None:
    long = {m.path: m.text.count("\n") for m in modules()}
    native = [p for s in ("*.cpp", "*.hpp") for p in SRC.rglob(s)]
    long |= {str(p.relative_to(ROOT)): p.read_text().count("\n") for p in native}
    assert {p: n for p, n in long.items() if n > MAX_FILE_LINES} == {}


def test_functions_have_at_most_70_lines() -> None:
    found = {
        f"{m.path}:{f.lineno} {f.name}": lines
        for m in modules()
        for f in _functions(m.tree)
        if (lines := (f.end_lineno or f.lineno) - f.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert found == {}


def test_no_module_is_a_drawer_for_everything() -> None:
    bad = [p for p in SRC.rglob("*") if p.stem.lower() in FORBIDDEN_NAMES]
    assert bad == []


def test_broad_except_reraises_or_stands_at_a_named_edge() -> None:
    found = []
    for module in modules("src"):
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ExceptHandler) or module.path in BROAD_EXCEPT_ALLOWED:
                continue
            names = ast.unparse(node.type) if node.type else "BaseException"
            broad = re.search(r"\b(Base)?Exception\b", names)
            # A bare `raise` anywhere but as the last statement could be skipped.
            reraises = isinstance(node.body[-1], ast.Raise)
            if broad and not reraises:
                found.append(f"{module.path}:{node.lineno}")
    assert found == []


def test_nothing_in_the_source_unpickles() -> None:
    found = {m.path: bad for m in modules("src") if (bad := imported_names(m.tree) & UNSERIALISERS)}
    assert found == {}
    # torch.load unpickles unless told otherwise.
    loads = [
        f"{m.path}:{node.lineno}"
        for m in modules("src")
        for node in ast.walk(m.tree)
        if isinstance(node, ast.Call) and called_name(node) in ("torch.load", "np.load", "eval")
    ]
    assert loads == []


def test_nothing_is_left_for_later() -> None:
    words = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    paths = [p for p in SRC.rglob("*") if p.suffix in (".py", ".cpp", ".hpp")]
    found = [
        f"{p.relative_to(ROOT)}:{n}"
        for p in paths
        for n, line in enumerate(p.read_text().splitlines(), 1)
        if words.search(line)
    ]
    assert found == []


def test_no_sleep_outside_named_places() -> None:
    found = [
        f"{m.path}:{node.lineno}"
        for m in modules("src")
        for node in ast.walk(m.tree)
        if isinstance(node, ast.Call)
        and called_name(node) in ("time.sleep", "sleep")
        and m.path not in SLEEP_ALLOWED
    ]
    assert found == []


def test_every_wait_in_the_source_has_a_limit() -> None:
    """`x.join()`, `x.wait()`, `x.acquire()`, `x.result()` without an argument can hang for ever."""
    found = [
        f"{m.path}:{node.lineno} {ast.unparse(node)}"
        for m in modules("src")
        for node in ast.walk(m.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("join", "wait", "acquire", "result")
        and not node.args
        and not node.keywords
        and m.path not in NEVER_WAITS
    ]
    assert found == []


def _undocumented(tree: ast.Module) -> Iterator[str]:
    if not ast.get_docstring(tree):
        yield "module"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                yield node.name


def test_public_modules_classes_and_functions_have_docstrings() -> None:
    found = [f"{m.path} {name}" for m in modules("src") for name in _undocumented(m.tree)]
    assert found == []


def test_no_boolean_defaults_are_positional() -> None:
    """`f(True)` says nothing at the call; ruff's FBT sees annotations, this sees defaults."""
    found = []
    for module in modules("src"):
        for function in _functions(module.tree):
            defaults = function.args.defaults
            if any(isinstance(d, ast.Constant) and isinstance(d.value, bool) for d in defaults):
                found.append(f"{module.path}:{function.lineno} {function.name}")
    assert found == []


@pytest.mark.parametrize("folder", sorted(p.name for p in SRC.iterdir() if p.is_dir()))
def test_every_package_has_tests(folder: str) -> None:
    if not any((SRC / folder).rglob("*.py")):
        pytest.skip("nothing but caches in it")
    needle = f"kvist.{folder}"
    assert any(needle in m.text for m in modules("tests") if "/tidy/" not in m.path), (
        f"no test imports {needle}"
    )


def test_test_names_say_the_claim() -> None:
    """At least three words after `test`: `test_evict` names a function, not a claim."""
    found = [
        f"{m.path}:{f.lineno} {f.name}"
        for m in modules("tests")
        for f in _functions(m.tree)
        if f.name.startswith("test_") and f.name.count("_") < 3
    ]
    assert found == []
