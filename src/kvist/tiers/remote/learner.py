"""How a host learns what is in the remote without ever making `contains` wait.

Three ways lead to `Knowledge`: blocks that this host stored or read; a listing of the keyspace's
objects at the start and now and then (thread `kvist-remote-list`), for what other hosts stored; and
probes (thread `kvist-remote-probe`), many keys a call, for keys that somebody looked up and nobody
knew of. A look-up of one key (`contains`) only notes the key for the next probe. A look-up of a
prompt's keys may wait for the answer, for `probe_s` in all and only while answers come in time:
after one that was late nobody waits until one is in time again.

The probing thread also removes damaged objects, after reading them once more: a host whose memory
or network flips bits must not empty a store that others share.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Condition, Event, Thread

from kvist.adapters.protocol import Got, StorageAdapter, Wanted
from kvist.core.errors import ClosedError, KvistError
from kvist.core.keys import Key
from kvist.tiers.remote.frames import Names, is_damaged
from kvist.tiers.remote.knowledge import Knowledge

_log = logging.getLogger(__name__)
_WAKE_S = 0.5
_PROBE_BLOCKS = 128  # keys in one call
_MOST_NOTED = 4096
_MOST_DAMAGED = 256
_PAGE_ENTRIES = 1000
_JOIN_S = 2.0
_RETRY_S = 30.0
_MOST_WHOLE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class LearnLimits:
    """How much and how often is asked.

    `probe_s`: how long a look-up of a prompt's keys may wait; 0: never. `refresh_s`: seconds
    between listings; 0: only at the start.
    """

    most_blocks: int = 250_000
    absent_s: float = 10.0
    probe_s: float = 0.005
    refresh_s: float = 300.0


@dataclass(slots=True)
class LearnCounts:
    """Totals: keys probed and found, waits by how they ended, listings, and what failed."""

    probed: int = 0
    found: int = 0
    waited: int = 0
    late: int = 0
    dropped_notes: int = 0
    listings: int = 0
    listed: int = 0
    failures: int = 0
    discarded: int = 0


@dataclass(frozen=True, slots=True)
class _Ask:
    """A question about keys that somebody waits for."""

    keys: Sequence[Key]
    answered: Event
    asked_s: float


class Learner:
    """The two threads of one remote tier."""

    def __init__(
        self,
        adapter: StorageAdapter,
        knowledge: Knowledge,
        names: Names,
        limits: LearnLimits,
        *,
        available: Callable[[], bool],
    ) -> None:
        """Starts them; while `available` says no, nothing is asked."""
        self._adapter = adapter
        self._knowledge = knowledge
        self._names = names
        self._limits = limits
        self._available = available
        self._work = Condition()
        self._stopping = False
        self._asked: list[_Ask] = []
        self._noted: dict[Key, None] = {}
        self._damaged: dict[Key, None] = {}
        self._behind = False
        self._listed = Event()
        self.counts = LearnCounts()
        self._threads = [
            Thread(target=self._probe_on, name="kvist-remote-probe", daemon=True),
            Thread(target=self._list_on, name="kvist-remote-list", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def note(self, key: Key) -> None:
        """Somebody would like to know of `key`, sometime. Does not wait for I/O."""
        with self._work:
            if len(self._noted) >= _MOST_NOTED:
                self.counts.dropped_notes += 1
            elif not self._stopping:
                self._noted[key] = None
                self._work.notify_all()

    def run(self, keys: Sequence[Key]) -> int:
        """How many keys from the first on are present, waiting for probes within the limits."""
        run = self._knowledge.run(keys)
        give_up_s = time.monotonic() + self._limits.probe_s
        while run < len(keys):
            # One probe covers more than was asked: keys follow each other in prompts.
            asked = self._knowledge.unknown(keys[run : run + _PROBE_BLOCKS])
            if not asked or asked[0] != keys[run] or not self._available():
                break
            ask = _Ask(asked, Event(), time.monotonic())
            with self._work:
                if self._stopping or self._limits.probe_s <= 0:
                    break
                wait = not self._behind
                if len(self._asked) < _MOST_NOTED // _PROBE_BLOCKS:
                    self._asked.append(ask)
                    self._work.notify_all()
            if not wait:
                break
            in_time = ask.answered.wait(max(0.0, give_up_s - time.monotonic()))
            with self._work:
                self.counts.waited += 1
                self.counts.late += not in_time
                self._behind = self._behind or not in_time
            grown = run + self._knowledge.run(keys[run:])
            if grown == run:
                break
            run = grown
        return run

    def discard(self, key: Key) -> None:
        """An object was found damaged; it is looked at again and removed."""
        with self._work:
            if len(self._damaged) < _MOST_DAMAGED and not self._stopping:
                self._damaged[key] = None
                self._work.notify_all()

    def wait_listed(self, timeout_s: float) -> bool:
        """Whether the first listing has ended, well or not, within the time."""
        return self._listed.wait(timeout_s)

    def stop(self) -> None:
        """Ends the threads; one that hangs in the medium is left to itself."""
        with self._work:
            self._stopping = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _probe_on(self) -> None:
        while True:
            with self._work:
                while not (self._stopping or self._asked or self._noted or self._damaged):
                    self._work.wait(_WAKE_S)
                if self._stopping:
                    return
                asked, self._asked = self._asked, []
                noted = [] if asked else list(self._noted)[:_PROBE_BLOCKS]
                for key in noted:
                    del self._noted[key]
                damaged = None
                if not asked and not noted:
                    damaged = self._damaged.popitem()[0]
            self._attempt(partial(self._serve, asked, noted, damaged))

    def _serve(
        self,
        asked: Sequence[_Ask],
        noted: Sequence[Key],
        damaged: Key | None,
    ) -> None:
        try:
            for ask in asked:
                self._probe(self._knowledge.unknown(ask.keys))
            if noted:
                self._probe(self._knowledge.unknown(noted))
            if damaged is not None:
                self._remove_if_damaged(damaged)
        finally:
            now_s = time.monotonic()
            for ask in asked:
                with self._work:
                    self._behind = now_s - ask.asked_s > self._limits.probe_s
                ask.answered.set()

    def _probe(self, keys: Sequence[Key]) -> None:
        if not keys or not self._available():
            return
        mark = self._knowledge.mark()
        answers = self._adapter.get([Wanted(self._names.name(key)) for key in keys])
        pairs = zip(keys, answers, strict=True)
        there = {key: a.size_bytes for key, a in pairs if a.got is not Got.ABSENT}
        self._knowledge.drop(set(keys).difference(there), since=mark)
        self._knowledge.add(there, since=mark)
        self.counts.probed += len(keys)
        self.counts.found += len(there)

    def _remove_if_damaged(self, key: Key) -> None:
        name = self._names.name(key)
        (about,) = self._adapter.get([Wanted(name)])
        if about.got is Got.ABSENT or about.size_bytes > _MOST_WHOLE_BYTES:
            return
        whole = memoryview(bytearray(about.size_bytes))
        if about.size_bytes:
            (about,) = self._adapter.get([Wanted(name, (whole,))])
        if about.got is Got.HIT and is_damaged(whole, key, self._names.keyspace):
            self._adapter.delete([name])
            self.counts.discarded += 1

    def _list_on(self) -> None:
        while True:
            if self._available():
                self._attempt(self._list)
            self._listed.set()
            with self._work:
                if self.counts.listings and not self._limits.refresh_s:
                    return
                pause_s = self._limits.refresh_s or _RETRY_S
                self._work.wait_for(lambda: self._stopping, pause_s)
                if self._stopping:
                    return

    def _list(self) -> None:
        mark = self._knowledge.mark()
        cursor: str | None = None
        while not self._stopping:
            page = self._adapter.list_page(self._names.prefix, cursor=cursor, limit=_PAGE_ENTRIES)
            found = ((self._names.key(e.name), e.size_bytes or 0) for e in page.entries)
            listed = {key: size_bytes for key, size_bytes in found if key is not None}
            self._knowledge.add(listed, since=mark)
            self.counts.listed += len(listed)
            cursor = page.cursor
            if cursor is None:
                self.counts.listings += 1
                if not page.partial:
                    self._knowledge.end_listing(mark)
                return
            if self._knowledge.full:
                return  # more than we may know; probes find the rest

    def _attempt(self, call: Callable[[], None]) -> None:
        """Learns what it can; a medium that fails teaches nothing."""
        try:
            call()
        except ClosedError:
            return
        except (KvistError, OSError) as error:
            self.counts.failures += 1
            _log.warning("remote: could not learn what is there: %s", error)
