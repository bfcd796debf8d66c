"""Server-sent events, cut out of a stream of bytes no further than at their ends."""

from __future__ import annotations

import re

from kvist.core.errors import FormatError

MOST_EVENT_BYTES = 16 << 20
DONE = b"data: [DONE]\n\n"
_END = re.compile(rb"\r?\n\r?\n")
_LONGEST_END = 4


class EventCutter:
    """Collects bytes and gives back whole events, each with the blank line that ends it."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._looked = 0  # no event ends before this offset

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are whole now.

        Raises:
            FormatError: one is longer than `MOST_EVENT_BYTES`.
        """
        rest = self._rest
        rest += data
        found, start = [], 0
        for end in _END.finditer(rest, self._looked):
            found.append(bytes(rest[start : end.end()]))
            start = end.end()
        if start:
            del rest[:start]
        self._looked = max(0, len(rest) - _LONGEST_END + 1)
        if len(rest) > MOST_EVENT_BYTES:
            raise FormatError(f"an event of more than {MOST_EVENT_BYTES} bytes")
        return found

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of an event that has begun."""
        return not self._rest.strip()


def payload_of(event: bytes) -> bytes | None:
    """What stands in an event's `data` lines; None in a comment."""
    if event.startswith(b"data: ") and event.find(b"\n") >= len(event) - 2:
        return event[6:].rstrip()  # the one form that engines send
    lines = [line[5:].lstrip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
