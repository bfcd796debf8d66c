"""How a host learns what is in the remote without ever making `contains` wait.

Three ways lead to `Knowledge`: blocks that this host stored or read; a listing of the keyspace's
objects at the start and now and then (thread `kvist-remote-list`), for what other hosts stored; and
probes (`tiers/probing.py`), many keys a call, for keys that somebody looked up and nobody knew of.

The probing thread also removes damaged objects, after reading them once more: a host whose memory
or network flips bits must not empty a store that others share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Event, Thread

from kvist.adapters.protocol import Got, StorageAdapter, Wanted
from kvist.core.keys import Key
from kvist.tiers.probing import ProbeCounts, Prober, attempt
from kvist.tiers.remote.frames import Names, is_damaged
from kvist.tiers.remote.knowledge import Knowledge

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
class LearnCounts(ProbeCounts):
    """Totals: those of probes, listings and what they named, and damaged objects removed."""

    listings: int = 0
    listed: int = 0
    discarded: int = 0


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
        self._listed = Event()
        self.counts = LearnCounts()
        self._prober = Prober(
            knowledge,
            self._probe,
            name="remote",
            probe_s=limits.probe_s,
            available=available,
            counts=self.counts,
            errand=self._remove_if_damaged,
        )
        self._lister = Thread(target=self._list_on, name="kvist-remote-list", daemon=True)
        self._lister.start()

    def note(self, key: Key) -> None:
        """Somebody would like to know of `key`, sometime. Does not wait for I/O."""
        self._prober.note(key)

    def run(self, keys: Sequence[Key]) -> int:
        """How many keys from the first on are present, waiting for probes within the limits."""
        return self._prober.run(keys)

    def discard(self, key: Key) -> None:
        """An object was found damaged; it is looked at again and removed."""
        self._prober.tend(key)

    def wait_listed(self, timeout_s: float) -> bool:
        """Whether the first listing has ended, well or not, within the time."""
        return self._listed.wait(timeout_s)

    def stop(self) -> None:
        """Ends the threads; one that hangs in the medium is left to itself."""
        with self._work:
            self._stopping = True
            self._work.notify_all()
        self._prober.stop()
        self._lister.join(_JOIN_S)

    def _probe(self, keys: Sequence[Key]) -> None:
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
                attempt(self._list, "remote", self.counts)
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
