"""The event loop: a virtual clock, a heap of actions, and one random stream for each purpose.

Actions run in order of (time, number of the call that scheduled them), so a run depends on nothing
but its seed: no wall clock, no hashes, no order of sets.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable

Action = Callable[[], None]

_SWEEP_SLACK = 256


class Event:
    """A scheduled action; `cancel` it by the kernel that gave it."""

    __slots__ = ("action", "time_s")

    def __init__(self, time_s: float, action: Action) -> None:
        self.time_s = time_s
        self.action: Action | None = action


class Kernel:
    """Runs actions at virtual times. `now_s` never goes back."""

    __slots__ = ("_cancelled", "_heap", "_next", "events", "now_s", "seed")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_s = 0.0
        self.events = 0  # that ran
        self._next = 0
        self._cancelled = 0
        self._heap: list[tuple[float, int, Event]] = []

    def __call__(self) -> float:
        """The virtual time in seconds, for whoever takes a clock."""
        return self.now_s

    def stream(self, what: str) -> random.Random:
        """A random stream of its own for `what`: drawing from one does not move another."""
        return random.Random(f"{self.seed} {what}")

    def at(self, time_s: float, action: Action) -> Event:
        """Schedules `action`.

        Raises:
            ValueError: a time in the past, or not finite.
        """
        if not self.now_s <= time_s < math.inf:
            raise ValueError(f"an event at {time_s} s, and it is {self.now_s} s")
        event = Event(time_s, action)
        heapq.heappush(self._heap, (time_s, self._next, event))
        self._next += 1
        return event

    def after(self, delay_s: float, action: Action) -> Event:
        """Schedules `action` in `delay_s` from now.

        Raises:
            ValueError: a negative or non-finite delay.
        """
        return self.at(self.now_s + delay_s, action)

    def cancel(self, event: Event | None) -> None:
        """Takes an event back; one that ran, was cancelled, or is None is ignored."""
        if event is None or event.action is None:
            return
        event.action = None
        self._cancelled += 1
        if self._cancelled > len(self._heap) // 2 + _SWEEP_SLACK:
            self._heap = [entry for entry in self._heap if entry[2].action is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def step(self) -> None:
        """Runs the next action; at least one must be scheduled."""
        time_s, _, event = heapq.heappop(self._heap)
        action = event.action
        if action is None:
            self._cancelled -= 1
            return
        event.action = None
        self.now_s = time_s
        self.events += 1
        action()

    def run(self) -> None:
        """Runs until nothing is scheduled."""
        while self._heap:
            self.step()
