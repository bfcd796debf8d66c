"""What engines and nodes say of blocks, brought to keys that mean the same for all replicas.

A Kvist node names blocks by their keys. A stock engine names them by hashes of its own, which may
differ from process to process; but it says which tokens, adapter and salt they are made of and
which block is before them. So their keys can be computed, and the table remembers the hash as the
engine's name of the block. What has no key is left out and counted: a miss, never a wrong belief.

    parent that is not known            it was lost or evicted; so is what follows
    images, embeddings                  the engine does not say all that is in the key
    adapter that nobody listed          its digest is in the key, not its name
    blocks left out of the middle       tokens cannot be told apart
    another block size                  said loudly, once: nothing of that engine ever matches
    other KV cache groups               of windows or states: they keep no whole prefix
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from kvist.cluster.directory import BIT_OF
from kvist.core.events import Content, Removed, Stored
from kvist.core.keys import RequestScope, seed_bytes
from kvist.core.outcome import Tier
from kvist.native import OwnerTable, digest

_log = logging.getLogger(__name__)
_MOST_SCOPES = 4096  # whose seeds are remembered
_WHOLE_PREFIX = frozenset([None, "full_attention", "mla_attention", "sink_full_attention"])

# Tiers of the table that are none: what a replica is predicted to have soon, by whether its engine
# publishes; two of each, which take turns (`index.py`).
_FIRST = 1 << len(Tier)
HEARD = (_FIRST, _FIRST << 1)
SILENT = (_FIRST << 2, _FIRST << 3)
IN_HBM = BIT_OF[Tier.HBM] | sum(HEARD) | sum(SILENT)


class Seeds:
    """Where the chains of a model's requests begin. May be used by many threads."""

    def __init__(
        self,
        fingerprint: bytes,
        adapters: Mapping[str, str] | None = None,
        *,
        by_name: bool = False,
    ) -> None:
        """Seeds of one keyspace.

        Args:
            fingerprint: of the keyspace, 32 bytes.
            adapters: the digest (`connectors.identity.lora_id`) of each LoRA adapter, by its name.
            by_name: an adapter that is not among them is known by its name, which all engines give
                to the same one. What a store keeps of it has other keys.
        """
        self._fingerprint = fingerprint
        self._by_name = by_name
        self._adapters = dict(adapters or {}) | {"": ""}
        self._seed = lru_cache(maxsize=_MOST_SCOPES)(self._computed)

    def seed(self, lora: str, salt: str) -> bytes | None:
        """The seed of requests with an adapter (its name) and a salt; None if it is not known."""
        lora_digest = self._adapters.get(lora, lora if self._by_name else None)
        return None if lora_digest is None else self._seed(lora_digest, salt)

    def _computed(self, lora_digest: str, salt: str) -> bytes:
        return digest(seed_bytes(self._fingerprint, RequestScope(lora_digest, salt)))


@dataclass(slots=True)
class FeedCounts:
    """Blocks of events that were left out since the start, by the reason."""

    orphans: int = 0  # their parent is not known
    unnamed: int = 0  # images, embeddings, unknown adapters, blocks left out of the middle
    mismatched: int = 0  # another block size
    partial: int = 0  # shorter than a block
    other_groups: int = 0


class EngineFeed:
    """Applies events to a table of owners. Needs the caller's lock."""

    def __init__(self, block_tokens: int, seeds: Seeds) -> None:
        """Of one model.

        Args:
            block_tokens: tokens of a block in keys.
            seeds: where chains begin.
        """
        self._block_tokens = block_tokens
        self.seeds = seeds
        self._groups: dict[int, int] = {}  # of each engine: the KV cache group that counts
        self._strange: set[int] = set()  # engines whose own cache has another block size
        self.counts = FeedCounts()
        self.mismatches: dict[str, int] = {}  # publishers with another block size, and which

    def apply(self, table: OwnerTable, source: int, name: str, event: Stored | Removed) -> None:
        """Changes the table by what a publisher says.

        Args:
            source: its number in the table.
            name: its name, for people.
        """
        if isinstance(event, Removed):
            # What has left was there, so a prediction that it will be is no news either.
            bits = IN_HBM if event.tier is Tier.HBM else BIT_OF[event.tier]
            if event.group == self._groups.get(source, event.group):
                table.remove(source, bits, event.keys)
        elif event.content is None:
            table.add(source, BIT_OF[event.tier], event.keys)
        elif self._counts_for_prefixes(source, event.group, event.content):
            self._add_described(table, source, name, event, event.content)
        else:
            self.counts.other_groups += len(event.keys)

    def forget(self, source: int) -> None:
        """A publisher was restarted, or is gone."""
        self._groups.pop(source, None)
        self._strange.discard(source)

    def understands(self, source: int) -> bool:
        """Whether what an engine says of its own cache can be used, as far as it has said any."""
        return source not in self._strange

    def _counts_for_prefixes(self, source: int, group: int, content: Content) -> bool:
        if content.spec not in _WHOLE_PREFIX:
            return False
        return self._groups.setdefault(source, group) == group

    def _add_described(
        self, table: OwnerTable, source: int, name: str, event: Stored, content: Content
    ) -> None:
        count, width = len(event.keys), self._block_tokens
        if content.block_tokens != width:
            if count == 1 and content.block_tokens < width:
                self.counts.partial += 1
            else:
                if event.tier is Tier.HBM:
                    self._strange.add(source)
                self._say_mismatch(name, content.block_tokens)
                self.counts.mismatched += count
            return
        seed = self.seeds.seed(content.lora, content.salt)
        named = content.named_blocks
        if seed is None or len(content.tokens) != 4 * width * count:
            named = 0
        self.counts.unnamed += count - named
        if seed is None or not named:
            return
        tokens = memoryview(content.tokens)[: 4 * width * named]
        keys, bits = event.keys[:named], BIT_OF[event.tier]
        if not table.add_chain(source, bits, keys, event.parent, seed, tokens, width):
            self.counts.orphans += named

    def _say_mismatch(self, name: str, block_tokens: int) -> None:
        if self.mismatches.get(name) == block_tokens:
            return
        self.mismatches[name] = block_tokens
        _log.error(
            "%s has blocks of %d tokens, requests are cut into blocks of %d: it never matches; "
            "start it with --block-size %d",
            name,
            block_tokens,
            self._block_tokens,
            self._block_tokens,
        )
