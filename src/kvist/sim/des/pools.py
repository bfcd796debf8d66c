"""Where blocks stand: the engine's HBM, counted by reference, and the bounded tiers below it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvist.core.hints import Hints
from kvist.core.keys import Key
from kvist.policy.leaf_lru import LeafLru
from kvist.policy.lru import Lru
from kvist.policy.protocol import EvictionPolicy, TakesHints
from kvist.sim.replay import Contender


def hbm_order(name: str) -> EvictionPolicy:
    """The order of blocks in HBM that no request uses: `lru` or `leaf-lru`."""
    return LeafLru() if name == "leaf-lru" else Lru()


class HbmPool:
    """Tokens of KV in HBM: named blocks, shared and counted, and tokens that have no name.

    Only blocks that no request holds stand in the eviction order, as in vLLM's free queue: a
    request's blocks enter it from the leaf to the root, so its tail goes first.
    """

    __slots__ = ("_order", "_refs", "block_tokens", "capacity_tokens", "keeps", "nameless_tokens")

    def __init__(
        self, capacity_tokens: int, block_tokens: int, order: EvictionPolicy, *, keeps: bool
    ) -> None:
        """`keeps` says whether blocks are named at all, that is, the prefix cache is on."""
        self.capacity_tokens = capacity_tokens
        self.block_tokens = block_tokens
        self.keeps = keeps
        self.nameless_tokens = 0
        self._refs: dict[Key, int] = {}
        self._order = order

    @property
    def used_tokens(self) -> int:
        """Tokens that are taken, by requests or by blocks kept for later."""
        return len(self._refs) * self.block_tokens + self.nameless_tokens

    @property
    def free_tokens(self) -> int:
        return self.capacity_tokens - self.used_tokens

    @property
    def spare_tokens(self) -> int:
        """Tokens that are free, or would be once nothing is kept for later."""
        return self.free_tokens + len(self._order) * self.block_tokens

    def matched(self, keys: Sequence[Key]) -> int:
        """How many of the first `keys` are there."""
        refs = self._refs
        for count, key in enumerate(keys):
            if key not in refs:
                return count
        return len(keys)

    def hold(self, keys: Iterable[Key]) -> None:
        """Takes a reference to blocks that are there."""
        for key in keys:
            count = self._refs[key]
            if not count:
                self._order.remove(key)
            self._refs[key] = count + 1

    def take(self, tokens: int) -> bool:
        """Takes nameless tokens, evicting as needed; takes nothing where there is no room."""
        if tokens > self.spare_tokens:
            return False
        self._make_room(tokens)
        self.nameless_tokens += tokens
        return True

    def give(self, tokens: int) -> None:
        """Gives nameless tokens back."""
        self.nameless_tokens -= tokens

    def name(self, keys: Sequence[Key]) -> None:
        """Turns nameless tokens into these blocks and holds them; what is there is shared."""
        self.nameless_tokens -= len(keys) * self.block_tokens
        for key in keys:
            if key in self._refs:
                self.hold((key,))
            else:
                self._refs[key] = 1

    def release(self, keys: Sequence[Key]) -> None:
        """Gives back references to a chain from its root; blocks stay until room is needed."""
        for i in range(len(keys) - 1, -1, -1):
            key = keys[i]
            count = self._refs[key] = self._refs[key] - 1
            if not count:
                self._order.insert(key, keys[i - 1] if i else None)

    def clear(self) -> None:
        """Forgets everything, held or not: the node was lost."""
        for key, count in self._refs.items():
            if not count:
                self._order.remove(key)
        self._refs.clear()
        self.nameless_tokens = 0

    def _make_room(self, tokens: int) -> None:
        over = tokens - self.free_tokens
        if over <= 0:
            return
        blocks = -(-over // self.block_tokens)
        for key in self._order.victims():
            self._order.remove(key)
            del self._refs[key]
            blocks -= 1
            if not blocks:
                break


class TierPool:
    """Blocks of a tier below HBM, in the order of a production policy.

    Blocks that are being read, or whose bytes are still to come, are pinned: never evicted. Those
    still to come are not matched.
    """

    __slots__ = ("_arriving", "_contender", "_gone", "_pins", "_resident", "capacity_blocks")

    def __init__(
        self, contender: Contender, capacity_blocks: int, gone: Callable[[Key], None]
    ) -> None:
        """`gone` is told of each block that was evicted or lost."""
        self.capacity_blocks = capacity_blocks
        self._contender = contender
        self._gone = gone
        self._resident: dict[Key, None] = {}
        self._arriving: set[Key] = set()
        self._pins: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._resident)

    def __contains__(self, key: Key) -> bool:
        return key in self._resident and key not in self._arriving

    def offer(self, keys: Sequence[Key], hints: Hints, now_s: float) -> list[Key]:
        """Uses a chain from its root: touches what is there, and makes room for what may enter.

        Returns those that entered: they are pinned until `arrived` or `lost`.
        """
        chosen = self._contender
        chosen.clock.now_s = now_s
        if isinstance(chosen.policy, TakesHints):
            chosen.policy.begin(hints)
        if chosen.may_refuse:
            new = self._use(keys)
            self._evict(len(self._resident) - self.capacity_blocks, ())
            entered = [key for key in new if key in self._resident]
        else:
            entered = self._use(self._fitting(keys))
        for key in entered:
            self._arriving.add(key)
            self.pin(key)
        return entered

    def arrived(self, key: Key) -> None:
        """The bytes of a block that entered are there."""
        if key in self._arriving:
            self._arriving.discard(key)
            self.unpin(key)

    def lost(self, key: Key) -> None:
        """The bytes of a block that entered will not come."""
        if key in self._arriving:
            self.drop((key,))

    def pin(self, key: Key) -> None:
        """Keeps a block from being evicted until `unpin`."""
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: Key) -> None:
        """Takes one pin back; after a `clear` there is none."""
        left = self._pins.get(key, 0) - 1
        if left > 0:
            self._pins[key] = left
        else:
            self._pins.pop(key, None)

    def drop(self, keys: Iterable[Key]) -> None:
        """Forgets blocks, pinned or not: their bytes are gone."""
        for key in keys:
            if key in self._resident:
                self._pins.pop(key, None)
                self._drop(key)

    def keys(self) -> list[Key]:
        """Every block, also those still to come, in order of entry."""
        return list(self._resident)

    def _drop(self, key: Key) -> None:
        self._contender.policy.remove(key)
        del self._resident[key]
        self._arriving.discard(key)
        self._gone(key)

    def _use(self, keys: Sequence[Key]) -> list[Key]:
        policy, new = self._contender.policy, []
        for i in range(len(keys) - 1, -1, -1):
            key = keys[i]
            if key in self._resident:
                policy.touch(key)
            else:
                policy.insert(key, keys[i - 1] if i else None)
                self._resident[key] = None
                new.append(key)
        return new

    def _fitting(self, keys: Sequence[Key]) -> Sequence[Key]:
        """The root's end of a chain that may enter, once room for it was made."""
        admits = self._contender.insert_filter
        if admits is not None:
            refused = [k not in self._resident and not admits.admits(k) for k in keys]
            keys = keys[: refused.index(True)] if True in refused else keys
        missing = sum(key not in self._resident for key in keys)
        over = len(self._resident) + missing - self.capacity_blocks
        over -= self._evict(over, keys)
        while over > 0:  # larger than what can be evicted: its root stays
            over -= keys[-1] not in self._resident
            keys = keys[:-1]
        return keys

    def _evict(self, count: int, spared: Iterable[Key]) -> int:
        if count <= 0:
            return 0
        kept, left = set(spared), count
        for key in self._contender.policy.victims():
            if key in kept or key in self._pins:
                continue
            self._drop(key)
            left -= 1
            if not left:
                break
        return count - left
