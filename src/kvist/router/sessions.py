"""Which replica a session's last request went to."""

from __future__ import annotations

from collections import OrderedDict

MAX_SESSIONS = 65_536


class Sessions:
    """Replica by session; the least recently used session is forgotten first."""

    __slots__ = ("_homes",)

    def __init__(self) -> None:
        self._homes: OrderedDict[str, str] = OrderedDict()

    def home(self, session: str) -> str | None:
        """Where its last request went."""
        return self._homes.get(session) if session else None

    def went(self, session: str, replica: str) -> None:
        """Its next request is at home there."""
        if not session:
            return
        self._homes[session] = replica
        self._homes.move_to_end(session)
        if len(self._homes) > MAX_SESSIONS:
            self._homes.popitem(last=False)

    def forget(self, replica: str) -> None:
        """A replica is gone."""
        for session in [s for s, home in self._homes.items() if home == replica]:
            del self._homes[session]
