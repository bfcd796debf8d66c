"""Where requests wait while every replica has enough queued, so that they go on in the best order.

What waits at an engine can no longer be put in order, nor go elsewhere. So a request is let on when
a replica has room, and the next when that one is in the router's books: who is let on goes to a
replica in the same turn of the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from kvist.gateway.faults import overloaded
from kvist.router.fairness import FairQueue
from kvist.router.protocol import Ask, Need, Refused

_LOOK_S = 0.02  # room comes with time, too
_RETRY_S = 2.0


class Room(Protocol):
    """The part of `kvist.router.protocol.Router` that says who may go on."""

    def has_room(self, now_s: float) -> bool:
        """Whether a replica should get more now."""
        ...

    def need(self, ask: Ask, ahead_s: float, now_s: float) -> Need | Refused:
        """What a request would take behind `ahead_s` of work, or why it need not wait."""
        ...


class Waiting:
    """The requests of one gateway that wait. For one event loop."""

    def __init__(
        self,
        queue: FairQueue,
        router: Room,
        clock: Callable[[], float],
        *,
        most_s: float,
    ) -> None:
        """`clock` is the router's. Who waited for `most_s` seconds is refused."""
        self._queue, self._router, self._clock = queue, router, clock
        self._most_s = most_s
        self._numbers = itertools.count(1)
        self._turns: dict[str, asyncio.Future[None]] = {}
        self._going: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._turns)

    async def turn(self, ask: Ask) -> float:
        """Returns when a request may go on; its replica is then to be chosen without awaiting.

        Returns:
            Seconds that it waited.

        Raises:
            Fault: 429, too many wait, or it waited for too long, or it is, or would be, too late.
        """
        came_s = self._clock()
        if not self._turns and self._router.has_room(came_s):
            return 0.0
        name = str(next(self._numbers))  # clients name requests as they like
        need = self._router.need(ask, self._queue.work_s, came_s)
        if isinstance(need, Refused):
            raise overloaded(need)
        refused = self._queue.offer(replace(ask, request=name), need, came_s)
        if refused is not None:
            raise overloaded(refused)
        turn = self._turns[name] = asyncio.get_running_loop().create_future()
        self._look()
        try:
            async with asyncio.timeout(self._most_s):
                await turn
            return self._clock() - came_s
        except TimeoutError as error:
            raise overloaded(Refused("queue-time", _RETRY_S)) from error
        finally:
            del self._turns[name]
            self._queue.remove(name)
            if self._going == name:
                self._going = None
                asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Lets the next one go on, if there is room."""
        now_s = self._clock()
        for late in self._queue.expire(now_s):
            self._end(late.request, overloaded(Refused("deadline", 0.0)))
        while self._going is None and len(self._queue) and self._router.has_room(now_s):
            found = self._queue.take()
            if found is not None and self._end(found.request, None):
                self._going = found.request
        if len(self._queue) and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._look()

    def _end(self, name: str, error: Exception | None) -> bool:
        turn = self._turns.get(name)
        if turn is None or turn.done():  # its client left
            return False
        if error is None:
            turn.set_result(None)
        else:
            turn.set_exception(error)
        return True
