"""Threads for calls that may hang."""

from __future__ import annotations

import threading

import pytest

from kvist.adapters.crew import Crew
from kvist.core.errors import TierError

LIMIT_S = 30.0


def _fail() -> None:
    raise TierError("the medium failed")


@pytest.mark.parametrize("call", [lambda: None, _fail], ids=["returns", "fails"])
def test_who_has_an_answer_finds_its_thread_free(call: object) -> None:
    """A layer of 16 threads, one call after the other on a busy machine, counted 16 busy ones."""
    crew, seen = Crew(1, name="test"), []
    told = threading.Event()
    go = threading.Event()

    def held() -> None:
        assert go.wait(LIMIT_S)
        call()  # type: ignore[operator]

    future = crew.submit(held)
    future.add_done_callback(lambda _: (seen.append(crew.busy), told.set()))
    assert crew.busy == 1
    go.set()
    assert told.wait(LIMIT_S)
    assert seen == [0]
    crew.close()


def test_a_call_that_was_cancelled_before_it_began_is_not_busy() -> None:
    crew, go = Crew(1, name="test"), threading.Event()
    first = crew.submit(lambda: go.wait(LIMIT_S))
    second = crew.submit(lambda: None)
    assert second.cancel()
    last = crew.submit(lambda: crew.busy)
    go.set()
    assert first.result(LIMIT_S)
    assert last.result(LIMIT_S) == 1  # itself
    crew.close()
