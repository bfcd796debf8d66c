"""The wires between simulated nodes: messages are late, lost, doubled, overtaken or cut off.

A message lies in its receiver's inbox with the time of its arrival; the receiver takes what has
arrived when it next does something. Which side of a partition a message is on counts when it is
sent.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Weather:
    """Chances of what happens to a message, and how late it may be."""

    loss: float = 0.0
    double: float = 0.0
    late: float = 0.0
    late_s: float = 2.0


CALM = Weather()
_QUICK_S = (0.002, 0.03)

Mail = tuple[float, int, Any]  # arrival, number of the message, the message


@dataclass(slots=True)
class Network:
    """Delivers messages between nodes by name."""

    random: random.Random
    weather: Weather = CALM
    inboxes: dict[str, list[Mail]] = field(default_factory=dict)
    cuts: dict[int, tuple[frozenset[str], frozenset[str]]] = field(default_factory=dict)
    sent: int = 0
    lost: int = 0

    def send(self, source: str, target: str, message: Any, now_s: float) -> None:
        """One message; a target that is not there loses it."""
        self.spread(source, (target,), message, now_s)

    def spread(self, source: str, targets: Iterable[str], message: Any, now_s: float) -> None:
        """The same message to each target, each with a fate of its own."""
        chance, weather, inboxes = self.random.random, self.weather, self.inboxes
        least_s, most_s = _QUICK_S
        for target in targets:
            inbox = inboxes.get(target)
            if inbox is None or target == source or (self.cuts and self._is_cut(source, target)):
                continue
            self.sent += 1
            if weather.loss and chance() < weather.loss:
                self.lost += 1
                continue
            delay_s = least_s + most_s * chance()
            if weather.late and chance() < weather.late:
                delay_s += weather.late_s * chance()
            inbox.append((now_s + delay_s, self.sent, message))
            if weather.double and chance() < weather.double:
                self.sent += 1
                inbox.append((now_s + delay_s + weather.late_s * chance(), self.sent, message))

    def _is_cut(self, source: str, target: str) -> bool:
        return any(source in ones and target in others for ones, others in self.cuts.values())
