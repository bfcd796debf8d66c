"""What the connector records of a request: lengths and keys, once, when it is over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_fakes import BLOCK, TABLE, Side, request

from kvist.core.hints import Finish


class FakeRecorder:
    def __init__(self, *, fails: bool = False) -> None:
        self.lines: list[tuple[Any, ...]] = []
        self._fails = fails

    def record(self, *line: Any) -> None:
        if self._fails:
            raise OSError("full")
        self.lines.append(line)


def _side(recorder: FakeRecorder) -> Side:
    side = Side()
    side.side._recorder = recorder  # type: ignore[assignment]
    side.side._clock = lambda: 12.5
    return side


def test_a_request_is_recorded_once_with_what_its_client_says_of_it() -> None:
    recorder = FakeRecorder()
    side = _side(recorder)
    told = {"kvist.session": "s1", "kvist.finish": "tool_use"}
    req = request("a", 2 * BLOCK + 1, kv_transfer_params=told)
    side.save_all(req, TABLE)
    side.idle()
    ((arrived_s, keys, tokens, output, finish, session),) = recorder.lines
    assert (arrived_s, tokens, output, finish, session) == (
        12.5, 2 * BLOCK + 1, 0, Finish.TOOL_USE, "s1",
    )  # fmt: skip
    assert len(keys) == 2


def test_a_request_that_says_nothing_is_recorded_without_a_session() -> None:
    recorder = FakeRecorder()
    side = _side(recorder)
    req = request("a", BLOCK, status=SimpleNamespace(name="FINISHED_STOPPED"))
    side.save_all(req, TABLE)
    assert [line[4:] for line in recorder.lines] == [(Finish.END_TURN, "")]


def test_a_recorder_that_fails_costs_the_engine_nothing() -> None:
    side = _side(FakeRecorder(fails=True))
    side.save_all(request("a", BLOCK), TABLE)
    assert len(side.store.ends) == 1
    assert side.side.fallback.take() == {"OSError": 1}
