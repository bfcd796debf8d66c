"""Says on stderr what changes among the processes of hosts, while a command waits for them."""

from __future__ import annotations

import sys
import time

from kvist.launch.spec import HostReport

_AGAIN_S = 15.0


class HostChanges:
    """What was said of each process."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str, int], tuple[str, float]] = {}

    def say(self, host: HostReport) -> None:
        """One line for each process that is in another phase; now and then what it does in it."""
        for number, child in enumerate(host.children):
            key, now = (host.node, child.what, number), time.monotonic()
            text = child.phase if child.phase == "ready" else f"{child.phase} ({child.detail})"
            before, when = self._said.get(key, ("", 0.0))
            is_new = child.phase != before.partition(" ")[0]
            if is_new or (text != before and now - when >= _AGAIN_S):
                self._said[key] = (text, now)
                print(f"kvist: {host.node} {child.what}: {text}", file=sys.stderr, flush=True)
