"""How a host learns which blocks others have without ever making `contains` wait: by probes.

A probe asks for many keys in one call, on a thread of its own. A look-up of one key (`note`) only
notes the key for the next probe. A look-up of a prompt's keys (`run`) may wait for the answer, for
`probe_s` in all and only while answers come in time: after one that was late nobody waits until
one is in time again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Condition, Event, Thread
from typing import Protocol

from kvist.core.errors import ClosedError, KvistError
from kvist.core.keys import Key

_log = logging.getLogger(__name__)
PROBE_BLOCKS = 128  # keys in one call
_WAKE_S = 0.5
_MOST_NOTED = 4096
_MOST_ERRANDS = 256
_JOIN_S = 2.0


class Beliefs(Protocol):
    """What a host believes of blocks that others may have. Thread-safe, no I/O."""

    def run(self, keys: Sequence[Key]) -> int:
        """How many keys from the first on are believed present."""
        ...

    def unknown(self, keys: Sequence[Key]) -> list[Key]:
        """Those of `keys` that are believed neither present nor absent."""
        ...


@dataclass(slots=True)
class ProbeCounts:
    """Totals: keys probed and found, waits and how many were late, notes dropped, failures."""

    probed: int = 0
    found: int = 0
    waited: int = 0
    late: int = 0
    dropped_notes: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class _Ask:
    """A question about keys that somebody waits for."""

    keys: Sequence[Key]
    answered: Event
    asked_s: float


class Prober:
    """The probing thread of one tier."""

    def __init__(
        self,
        beliefs: Beliefs,
        probe: Callable[[Sequence[Key]], None],
        *,
        name: str,
        probe_s: float,
        available: Callable[[], bool],
        counts: ProbeCounts,
        errand: Callable[[Key], None] = lambda key: None,
    ) -> None:
        """Starts it.

        Args:
            beliefs: what is known.
            probe: asks for keys and teaches `beliefs` what came back, or raises.
            name: of the tier, in the log and of the thread.
            probe_s: how long `run` may wait in all; 0: never.
            available: while it says no, nothing is asked.
            counts: are kept there.
            errand: is done for each key given to `tend`, when nothing is asked.
        """
        self._beliefs = beliefs
        self._probe = probe
        self._name = name
        self._probe_s = probe_s
        self._available = available
        self._counts = counts
        self._errand = errand
        self._work = Condition()
        self._stopping = False
        self._asked: list[_Ask] = []
        self._noted: dict[Key, None] = {}
        self._errands: dict[Key, None] = {}
        self._behind = False
        self._thread = Thread(target=self._serve, name=f"kvist-{name}-probe", daemon=True)
        self._thread.start()

    def note(self, key: Key) -> None:
        """Somebody would like to know of `key`, sometime. Does not wait for I/O."""
        with self._work:
            if len(self._noted) >= _MOST_NOTED:
                self._counts.dropped_notes += 1
            elif not self._stopping:
                self._noted[key] = None
                self._work.notify_all()

    def tend(self, key: Key) -> None:
        """Does the errand for `key` when there is time."""
        with self._work:
            if len(self._errands) < _MOST_ERRANDS and not self._stopping:
                self._errands[key] = None
                self._work.notify_all()

    def run(self, keys: Sequence[Key]) -> int:
        """How many keys from the first on are present, waiting for probes within the limits."""
        run = self._beliefs.run(keys)
        give_up_s = time.monotonic() + self._probe_s
        while run < len(keys):
            # One probe covers more than was asked: keys follow each other in prompts.
            asked = self._beliefs.unknown(keys[run : run + PROBE_BLOCKS])
            if not asked or asked[0] != keys[run] or not self._available():
                break
            ask = _Ask(asked, Event(), time.monotonic())
            with self._work:
                if self._stopping or self._probe_s <= 0:
                    break
                wait = not self._behind
                if len(self._asked) < _MOST_NOTED // PROBE_BLOCKS:
                    self._asked.append(ask)
                    self._work.notify_all()
            if not wait:
                break
            in_time = ask.answered.wait(max(0.0, give_up_s - time.monotonic()))
            with self._work:
                self._counts.waited += 1
                self._counts.late += not in_time
                self._behind = self._behind or not in_time
            grown = run + self._beliefs.run(keys[run:])
            if grown == run:
                break
            run = grown
        return run

    def stop(self) -> None:
        """Ends the thread; one that hangs in the medium is left to itself."""
        with self._work:
            self._stopping = True
            self._work.notify_all()
        self._thread.join(_JOIN_S)

    def _serve(self) -> None:
        while True:
            with self._work:
                while not (self._stopping or self._asked or self._noted or self._errands):
                    self._work.wait(_WAKE_S)
                if self._stopping:
                    return
                asked, self._asked = self._asked, []
                noted = [] if asked else list(self._noted)[:PROBE_BLOCKS]
                for key in noted:
                    del self._noted[key]
                errand = None
                if not asked and not noted:
                    errand = self._errands.popitem()[0]
            attempt(partial(self._answer, asked, noted, errand), self._name, self._counts)

    def _answer(self, asked: Sequence[_Ask], noted: Sequence[Key], errand: Key | None) -> None:
        try:
            for ask in asked:
                self._ask(ask.keys)
            if noted:
                self._ask(noted)
            if errand is not None:
                self._errand(errand)
        finally:
            now_s = time.monotonic()
            for ask in asked:
                with self._work:
                    self._behind = now_s - ask.asked_s > self._probe_s
                ask.answered.set()

    def _ask(self, keys: Sequence[Key]) -> None:
        unknown = self._beliefs.unknown(keys)
        if unknown and self._available():
            self._probe(unknown)


def attempt(call: Callable[[], None], name: str, counts: ProbeCounts) -> None:
    """Learns what it can; a medium that fails teaches nothing."""
    try:
        call()
    except ClosedError:
        return
    except (KvistError, OSError) as error:
        counts.failures += 1
        _log.warning("%s: could not learn what is there: %s", name, error)
