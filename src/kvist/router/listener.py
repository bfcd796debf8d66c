"""Brings what engines and nodes publish to an index, and asks for what is missing.

The sockets are those that nodes have (`node/events.py`, extra `cluster`). Nothing here waits for a
publisher; how often to step, and on which thread, is the caller's business.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from kvist.cluster.discovery.protocol import Discovery
from kvist.cluster.follower import Ask
from kvist.cluster.record import NodeRecord
from kvist.cluster.view import ClusterView
from kvist.cluster.wire import Batch
from kvist.core.errors import KvistError
from kvist.router.index import PrefixIndex

_log = logging.getLogger(__name__)


class Lines(Protocol):
    """Connections to publishers: `node.events.EventLines`. Nothing here waits."""

    def follow(self, records: Iterable[NodeRecord]) -> None:
        """Connects to these publishers and to no others."""
        ...

    def ask(self, ask: Ask) -> None:
        """Asks a publisher for batches; the answer comes in `receive`, or not at all."""
        ...

    def answered(self) -> list[str]:
        """Publishers whose answer has come to its end, or who cannot be asked."""
        ...

    def reconnected(self) -> list[str]:
        """Publishers whose connection broke and came up again since the last call."""
        ...

    def receive(self) -> Iterator[Batch]:
        """What has come."""
        ...


class Listener:
    """Keeps an index up to date. `look` may block on discovery; `step` never does."""

    def __init__(
        self,
        index: PrefixIndex,
        lines: Lines,
        discovery: Discovery,
        lock: AbstractContextManager[object],
    ) -> None:
        """Listens to nobody yet.

        Args:
            lines: its sockets; they may be polled between steps.
            lock: of the index; taken while what was heard is applied.
        """
        self.view = ClusterView(directory=index)
        self._lines = lines
        self._discovery = discovery
        self._lock = lock
        self._listed: list[NodeRecord] = []  # what discovery last found
        self.discovery_failures = 0

    def look(self, now_s: float) -> None:
        """Finds publishers; a failure is counted, and those found before are listened to."""
        try:
            listed = self._discovery.members()
        except KvistError as error:
            self.discovery_failures += 1
            _log.debug("discovery: %s", error)
            return
        with self._lock:
            self._listed = listed
            self.view.discovered(listed, now_s)

    def step(self, now_s: float) -> None:
        """Applies what has come, and asks for what is missing.

        The lock is taken for each message anew.
        """
        with self._lock:
            for publisher in self._lines.reconnected():
                self.view.reconnected(publisher, now_s)
        for batch in self._lines.receive():
            with self._lock:
                self.view.hear(batch, now_s)
        with self._lock:
            for publisher in self._lines.answered():
                self.view.answered(publisher, now_s)
            asks = self.view.tick(now_s)
            # Who is listed is listened to though it is gone: it may come back.
            known = {r.node: r for r in (*self._listed, *self.view.membership.records())}
        self._lines.follow(known.values())
        for ask in asks:
            self._lines.ask(ask)
