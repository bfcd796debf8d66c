"""The one broad `except`: harmless answers, counted and logged once."""

from __future__ import annotations

import logging

import pytest

from kvist.connectors.fallback import Fallback
from kvist.core.errors import NoSpaceError, TierTimeout


def _raise(error: BaseException) -> int:
    raise error


def test_guard_gives_the_result_when_nothing_fails() -> None:
    fallback = Fallback()
    assert fallback.guard("hook", lambda: 5, default=0) == 5
    assert fallback.take() == {}


@pytest.mark.parametrize("error", [NoSpaceError("full"), TierTimeout("late"), KeyError("bug")])
def test_guard_turns_any_error_into_the_harmless_answer(error: Exception) -> None:
    fallback = Fallback()
    assert fallback.guard("hook", lambda: _raise(error), default=-1) == -1
    assert fallback.take() == {type(error).__name__: 1}


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_guard_lets_an_interrupt_through(stop: type[BaseException]) -> None:
    fallback = Fallback()
    with pytest.raises(stop):
        fallback.guard("hook", lambda: _raise(stop()), default=0)


def test_take_counts_by_class_and_starts_afresh() -> None:
    fallback = Fallback()
    for error in (OSError("a"), OSError("b"), ValueError("c")):
        fallback.record("hook", error)
    assert fallback.take() == {"OSError": 2, "ValueError": 1}
    assert fallback.take() == {}


def test_first_error_of_a_kind_in_a_hook_is_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fallback = Fallback()
    with caplog.at_level(logging.WARNING, "kvist.fallback"):
        for hook in ("load", "load", "save"):
            fallback.guard(hook, lambda: _raise(OSError("gone")), default=0)
    assert [r.getMessage().split()[1] for r in caplog.records] == ["load", "save"]
    assert all(r.exc_info for r in caplog.records)
