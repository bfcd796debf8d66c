"""The index as a router asks it: in tokens, and told of every choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvist.core.keys import Key
from kvist.router.candidates import Prefix
from kvist.router.index import PrefixIndex


class IndexedPrefixes:
    """`Prefixes` and `LearnsChoices` over an index. Not thread-safe: under the router's lock."""

    def __init__(self, index: PrefixIndex) -> None:
        """Owns `index`; replicas come to it as they are chosen or attached."""
        self._index = index
        self._attached: set[str] = set()

    def match(self, keys: Sequence[Key]) -> Mapping[str, Prefix]:
        """See `Prefixes`."""
        if not keys:
            return {}
        tokens = self._index.block_tokens
        return {
            name: Prefix(
                hbm_tokens=found.hbm_blocks * tokens,
                own_tokens=found.ssd_blocks * tokens,
                ssd_tokens=(found.ssd_blocks - found.dram_blocks) * tokens,
                reachable_tokens=found.reachable_blocks * tokens,
            )
            for name, found in self._index.match(keys).items()
        }

    def expire(self, now_s: float) -> None:
        """See `LearnsChoices`."""
        self._index.expire(now_s)

    def chosen(self, replica: str, keys: Sequence[Key], now_s: float) -> None:
        """See `LearnsChoices`."""
        if replica not in self._attached:
            self._attached.add(replica)
            self._index.attach(replica)
        self._index.predict(replica, keys, now_s)

    def removed(self, replica: str) -> None:
        """See `LearnsChoices`."""
        if replica in self._attached:
            self._attached.discard(replica)
            self._index.detach(replica)
