"""The handle of an engine process, over a script that speaks as an engine does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvist.bench import engine as module
from kvist.bench.engine import Engine, EngineError

SCRIPT = """
import json, subprocess, sys
replies = sys.stdout
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open("pids", "w").write(str(child.pid))
print(json.dumps({"ready": True, "start_s": 2.5}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "stop":
        break
    if request["op"] == "forget":
        print(json.dumps({"done": False}), flush=True)
        continue
    if request["op"] == "rest":
        print("RuntimeError: out of pages", file=sys.stderr)
        sys.exit(3)
    if not request["max_tokens"]:
        continue  # hangs
    n = [len(p) for p in request["prompts"]]
    reply = {"took_s": 0.25, "cached_tokens": n, "tokens": [[7] * request["max_tokens"]] * len(n)}
    print(json.dumps(reply), flush=True)
print("{}", flush=True)
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Engine]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = dict(os.environ)
    engine = Engine.start("toy", {"model": "m"}, folder=tmp_path, env=env, script=script)
    yield engine
    engine.kill()


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_an_engine_answers_and_stops_with_all_its_children(started: Engine, tmp_path: Path) -> None:
    assert started.wait_ready() == 2.5
    answer = started.ask([[1, 2], [3]], max_tokens=2)
    assert answer.took_s == 0.25
    assert answer.cached_tokens == (2, 1)
    assert answer.tokens == ((7, 7), (7, 7))
    child = int((tmp_path / "pids").read_text())
    started.stop()
    started.kill()  # a second time does no harm
    assert not alive(child)


def test_a_dead_engine_is_an_error_that_ends_with_its_last_words(started: Engine) -> None:
    started.wait_ready()
    with pytest.raises(EngineError, match=r"toy has ended: RuntimeError: out of pages"):
        started.rest(0.1)
    with pytest.raises(EngineError, match="toy has ended"):
        started.ask([[1]], max_tokens=1)
    started.stop()


def test_an_engine_that_does_not_answer_is_an_error(
    started: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    started.wait_ready()
    monkeypatch.setattr(module, "_ANSWER_S", 0.2)
    with pytest.raises(EngineError, match="did not answer within"):
        started.ask([[1]], max_tokens=0)


def test_pages_that_cannot_be_forgotten_are_an_error(started: Engine) -> None:
    started.wait_ready()
    with pytest.raises(EngineError, match="cannot be emptied"):
        started.forget()
