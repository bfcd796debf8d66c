"""What goes on beside its owner: pieces of work, each on a thread, until the owner ends them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

_JOIN_S = 5.0


class Threads:
    """`start` and `end` are for one thread.

    Attributes:
        ending: is set when the work is to end; works look at it, and wait on it.
    """

    def __init__(self, works: Mapping[str, Callable[[], None]]) -> None:
        """`works` by the names of their threads; none has begun."""
        self.ending = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True) for name, work in works.items()
        ]

    def start(self) -> None:
        """Begins all."""
        for thread in self._threads:
            thread.start()

    def end(self) -> bool:
        """Has all end, and waits for them, some seconds each; False if that was done before."""
        if self.ending.is_set():
            return False
        self.ending.set()
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join(_JOIN_S)
        return True
