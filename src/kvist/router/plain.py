"""The policy that knows nothing of prefixes: the replica with the fewest requests, in turn."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

from kvist.router.protocol import Ask, Choice, Refused

NO_REPLICA = "no-replica"
_RETRY_S = 1.0


@dataclass(slots=True)
class _Replica:
    healthy: bool = True
    draining: bool = False
    booked: int = 0
    turn: int = 0  # of its last request: among equals the one that waited longest is next


class LeastBooked:
    """The router of a gateway that has no index. Refuses only when no replica is up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replicas: dict[str, _Replica] = {}
        self._bookings: dict[int, _Replica] = {}
        self._numbers = itertools.count(1)

    def choose(self, ask: Ask, now_s: float) -> Choice | Refused:
        """The replica with the fewest bookings that is up and not excluded."""
        with self._lock:
            able = [
                (name, replica)
                for name, replica in self._replicas.items()
                if replica.healthy and not replica.draining and name not in ask.exclude
            ]
            if not able:
                return Refused(NO_REPLICA, _RETRY_S)
            name, chosen = min(able, key=lambda found: (found[1].booked, found[1].turn))
            booking = next(self._numbers)
            chosen.booked, chosen.turn = chosen.booked + 1, booking
            self._bookings[booking] = chosen
        return Choice(name, booking, hit_tokens=0, ttft_s=0.0, reason="fewest requests")

    def first_token(self, booking: int, now_s: float) -> None:
        """Nothing is learned from it."""

    def progress(self, booking: int, tokens: int, now_s: float) -> None:
        """Nothing is learned from it."""

    def finish(self, booking: int, now_s: float, *, failed: bool = False) -> None:
        """Ends a booking; one that is not open is ignored."""
        with self._lock:
            replica = self._bookings.pop(booking, None)
            if replica is not None:
                replica.booked -= 1

    def add(self, replica: str, *, role: str = "both") -> None:
        """A replica that may be chosen from now on; here each does everything.

        Raises:
            ValueError: another role.
        """
        if role != "both":
            raise ValueError(f"no role for this router: {role}")
        with self._lock:
            self._replicas.setdefault(replica, _Replica())

    def set_state(self, replica: str, *, healthy: bool, draining: bool = False) -> None:
        """Unhealthy and draining replicas get nothing new; an unknown one is ignored."""
        with self._lock:
            if (known := self._replicas.get(replica)) is not None:
                known.healthy, known.draining = healthy, draining

    def remove(self, replica: str) -> None:
        """Forgets a replica; its bookings stay open until `finish`."""
        with self._lock:
            self._replicas.pop(replica, None)

    @property
    def booked(self) -> int:
        """Bookings that are open."""
        return len(self._bookings)
