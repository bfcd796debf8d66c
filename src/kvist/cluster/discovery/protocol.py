"""`Discovery`: where nodes leave their record, and find everybody's.

It need not be fast, fresh or always there: a cluster that knows each other goes on without it. What
a record says is judged by `membership.py`; discovery only forgets what nobody renews.
"""

from __future__ import annotations

from typing import Protocol

from kvist.cluster.record import NodeRecord


class Discovery(Protocol):
    """Safe to be used by many nodes on many hosts at once, each with an object of its own."""

    def announce(self, record: NodeRecord, *, ttl_s: float) -> None:
        """Leaves a record for others, in place of the node's former one.

        It vanishes when it was not announced again for `ttl_s`, or somewhat later.

        Raises:
            TierError: the medium failed; the former record may still be there.
        """

    def withdraw(self, node: str) -> None:
        """Takes a node's record away; an absent one is ignored.

        Raises:
            TierError: the medium failed.
        """

    def members(self) -> list[NodeRecord]:
        """Every record that is there, by name; what cannot be read is left out.

        Raises:
            TierError: the medium failed.
        """

    def close(self) -> None:
        """Lets go of connections; records stay until their time is over."""
