"""What one reader knows of the cluster: who is there, who has what, who should have it.

A router needs a `ClusterView`; a node has one too (`member.py`). Messages go in, asks come out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvist.cluster.directory import Directory, Limits, Position
from kvist.cluster.follower import Ask
from kvist.cluster.membership import Change, Membership, Timings
from kvist.cluster.placement import Placement
from kvist.cluster.record import NodeRecord
from kvist.cluster.wire import Batch
from kvist.core.keys import Key

DEFAULT_REPLICAS = 2


class ClusterView:
    """Membership, directory and placement of one reader. Not thread-safe: the caller's lock."""

    def __init__(
        self,
        *,
        own: str = "",
        replicas: int = DEFAULT_REPLICAS,
        timings: Timings | None = None,
        limits: Limits | None = None,
        directory: Directory | None = None,
    ) -> None:
        """A view that knows nobody.

        Args:
            own: the name of the node that this view belongs to; it is not followed.
            replicas: copies of a block that there should be.
            directory: in place of a new one within `limits`.
        """
        self._own = own
        self._replicas = replicas
        self.membership = Membership(timings)
        self.directory = Directory(limits) if directory is None else directory
        self._placement: Placement | None = None
        self._placed_version = -1
        self._listed = False
        self.strangers = 0

    def hear(self, batch: Batch, now_s: float) -> None:
        """A message; one of a node that is gone or unknown counts only with a record."""
        if batch.node == self._own:
            return
        if batch.record is not None and self.membership.hear(batch.record, now_s) is Change.GONE:
            self.directory.drop(batch.node)
        elif batch.node in self.membership:
            self.directory.take(batch, now_s)
        else:
            self.strangers += 1

    def answered(self, node: str, now_s: float) -> None:
        """As `Directory.answered`."""
        self.directory.answered(node, now_s)

    def reconnected(self, node: str, now_s: float) -> None:
        """As `Directory.reconnected`."""
        self.directory.reconnected(node, now_s)

    def meet(self, record: NodeRecord, now_s: float) -> Change | None:
        """A node's record that came by another way than its events."""
        change = self.membership.hear(record, now_s)
        if change is Change.GONE:
            self.directory.drop(record.node)
        elif record.node != self._own and record.node in self.membership:
            self.directory.expect(record.node, record.incarnation, record.newest, now_s)
        return change

    def discovered(self, records: Iterable[NodeRecord], now_s: float) -> None:
        """Everything that discovery lists now."""
        listed = list(records)
        self._listed = True
        for record in listed:
            if record.node != self._own:
                self.meet(record, now_s)
        for node in self.membership.vouched((r.node for r in listed), now_s):
            self.directory.drop(node)

    def tick(self, now_s: float) -> list[Ask]:
        """Lets the silent go; says what to ask of whom."""
        for node, change in self.membership.tick(now_s):
            if change is Change.GONE:
                self.directory.drop(node)
        return self.directory.asks(now_s)

    @property
    def placement(self) -> Placement:
        """Where groups belong, by what is known now."""
        if self._placement is None or self._placed_version != self.membership.version:
            self._placement = self._placed(self.membership.takers())
            self._placed_version = self.membership.version
        return self._placement

    def readers_choice(self, key: Key) -> list[str]:
        """Nodes to read a block from, best first: fastest tier, suspects last, never oneself."""
        members = self.membership
        holders = [h.node for h in self.directory.holders(key) if h.node != self._own]
        known = [node for node in holders if node in members]
        return sorted(known, key=members.is_suspect)

    def reach(self, keys: Sequence[Key]) -> dict[str, int]:
        """As `Directory.reach`."""
        return self.directory.reach(keys)

    def missed(self, node: str, key: Key, at: Position) -> None:
        """A node that should have had a block said at `at` that it has not."""
        self.directory.disbelieve(node, key, at)

    @property
    def complete(self) -> bool:
        """Whether discovery has said who is there, and all that was heard of has been applied."""
        return self._listed and self.directory.complete

    def _placed(self, takers: list[NodeRecord]) -> Placement:
        return Placement(takers, replicas=self._replicas)
