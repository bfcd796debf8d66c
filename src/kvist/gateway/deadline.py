"""A limit on what a task waits for that can be moved on at next to no cost.

`asyncio.timeout` sets a timer up and takes it down each time, and a stream waits twice for each of
its tokens: for the engine, and for its client. Here one timer stands for all waits. When it goes
off and the limit has been moved on meanwhile, it is set anew; so a wait costs a comparison.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import TypeVar

_T = TypeVar("_T")


class Deadline:
    """For the waits of one task, one after the other; `close` it in the end."""

    __slots__ = ("_armed_s", "_expired", "_task", "_timer", "_until_s")

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._armed_s = math.inf  # when the timer goes off
        self._until_s = math.inf  # of the wait under way
        self._task: asyncio.Task[object] | None = None  # that waits
        self._expired = False

    async def wait(self, waited: Awaitable[_T], until_s: float) -> _T:
        """What is waited for.

        Args:
            until_s: the limit, on the loop's clock.

        Raises:
            TimeoutError: it did not come before the limit; it was cancelled.
        """
        self._task = task = asyncio.current_task()
        assert task is not None
        self._until_s, self._expired = until_s, False
        if until_s < self._armed_s:
            self._arm(until_s)
        before = task.cancelling()
        try:
            return await waited
        except asyncio.CancelledError as error:
            if self._expired and task.uncancel() <= before:
                raise TimeoutError from error
            raise
        finally:
            self._task = None

    def expire(self) -> None:
        """Ends the wait under way, if there is one, as if its limit had passed."""
        if self._task is not None and not self._expired:
            self._expired = True
            self._task.cancel()

    def close(self) -> None:
        """Takes the timer down; there is no wait under way."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._armed_s = None, math.inf

    def _arm(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_s = at_s
        self._timer = asyncio.get_running_loop().call_at(at_s, self._due)

    def _due(self) -> None:
        self._timer, self._armed_s = None, math.inf
        if self._task is None:  # the next wait sets it up
            return
        if asyncio.get_running_loop().time() < self._until_s:
            self._arm(self._until_s)
        else:
            self.expire()
