"""The index as a router asks it: in tokens, told of every choice, while others apply events to it.

What a replica can have from other hosts is what one of their nodes has from the first block on: a
replica fetches through its own node, so one without a node has what its engine has, and no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvist.core.keys import Key
from kvist.router.candidates import Prefix
from kvist.router.index import Prefix as Found
from kvist.router.index import PrefixIndex
from kvist.router.turns import Turns


class IndexedPrefixes:
    """`Prefixes` and `LearnsChoices` over an index. Thread-safe: the index is under `lock`."""

    def __init__(
        self,
        index: PrefixIndex,
        *,
        engines: Mapping[str, str] | None = None,
        lock: Turns | None = None,
    ) -> None:
        """Owns `index`.

        Args:
            engines: the name that its engine's events come under, by replica. Others come to the
                index as they are chosen, and their engines' names are their own.
            lock: of the index, for who applies events.
        """
        self.index = index
        self.lock = lock or Turns()
        self._engines = dict(engines or {})
        self._nodes: Mapping[str, str] = {}
        self._attached: set[str] = set()
        for replica in self._engines:
            self._attach(replica)

    def keys(self, tokens: Sequence[int], lora: str, salt: str) -> tuple[Key, ...]:
        """The keys of a prompt's full blocks. Takes no lock."""
        return tuple(self.index.keys(np.asarray(tokens, np.uint32), lora=lora, salt=salt))

    def match(self, keys: Sequence[Key]) -> Mapping[str, Prefix]:
        """See `Prefixes`."""
        if not keys:
            return {}
        with self.lock:
            found = self.index.match(keys)
            nodes = sorted(set(self._nodes.values()))
            far = self.index.farthest(keys, nodes) if nodes else 0
        if not found and not far:
            return {}
        # All are named: what counts for others would be what the best of these could have.
        nothing = Found(0, 0, 0, 0)
        return {
            name: self._in_tokens(name, found.get(name, nothing), far)
            for name in self._attached | found.keys()
        }

    def expire(self, now_s: float) -> None:
        """See `LearnsChoices`."""
        with self.lock:
            self.index.expire(now_s)

    def chosen(self, replica: str, keys: Sequence[Key], now_s: float) -> None:
        """See `LearnsChoices`."""
        with self.lock:
            if replica not in self._attached:
                self._attach(replica)
            self.index.predict(replica, keys, now_s)

    def removed(self, replica: str) -> None:
        """See `LearnsChoices`. What its engine says from now on is heard."""
        with self.lock:
            self.index.detach(replica)
            self._attached.discard(replica)
            if replica in self._engines:
                self._attach(replica)

    def place(self, nodes: Mapping[str, str]) -> None:
        """Which node each replica reads from, by its name; those not in it read from none."""
        with self.lock:
            self._nodes = dict(nodes)
            for replica in tuple(self._attached):
                self._attach(replica)

    def rename(self, fingerprint: bytes) -> None:
        """Names prompts in another keyspace; see `PrefixIndex.rename`."""
        with self.lock:
            self.index.rename(fingerprint)

    def measures(self) -> dict[str, float]:
        """What the index counts, under the names of `kvist.metrics`."""
        with self.lock:
            return self.index.measures()

    def _attach(self, replica: str) -> None:
        self._attached.add(replica)
        engine = self._engines.get(replica)
        self.index.attach(replica, engine=engine, node=self._nodes.get(replica))

    def _in_tokens(self, replica: str, found: Found, far: int) -> Prefix:
        tokens = self.index.block_tokens
        own = found.ssd_blocks
        reachable = max(found.reachable_blocks, far) if replica in self._nodes else own
        return Prefix(
            hbm_tokens=found.hbm_blocks * tokens,
            own_tokens=own * tokens,
            ssd_tokens=(own - found.dram_blocks) * tokens,
            reachable_tokens=reachable * tokens,
        )
