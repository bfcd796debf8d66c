"""How long to wait before what ended is started again: longer while it keeps ending at once."""

from __future__ import annotations

_FIRST_S = 1.0
_LONGEST_S = 30.0
_GOOD_LIFE_S = 60.0  # after which an end counts as the first


class Pauses:
    """The pauses of one process."""

    def __init__(self) -> None:
        self._next_s = _FIRST_S

    def after(self, lived_s: float) -> float:
        """Seconds until the next start of what lived so long."""
        pause_s = _FIRST_S if lived_s >= _GOOD_LIFE_S else self._next_s
        self._next_s = min(2 * pause_s, _LONGEST_S)
        return pause_s
