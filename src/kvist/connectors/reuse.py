"""Whether blocks that nobody has asked for before are worth saving.

Theory of operation. Saving a block costs the engine a copy; what it may bring is that block's
computation, if it is asked for again. So the keys of prompts are remembered, without their bytes,
and the share of blocks that had been asked for before is kept as a running mean: it starts at 1,
as an empty cache knows nothing, and forgets with time. Where it falls below what a save costs
(as a share of what a reuse spares), only blocks that were seen before are saved. A share that
rises again is seen all the same, since keys are remembered whether blocks were saved or not.

Pure; no clock; one owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvist.core.keys import Key

_PRIOR_BLOCKS = 64  # how much the belief of the start counts
_MEMORY_BLOCKS = 4096  # over how many blocks the mean forgets
_MOST_KEYS = 1 << 17
_MIN_RATIO = 0.005  # below, a save is so cheap that no evidence is enough to leave it


class ReuseWatch:
    """Keys seen of late, and the share of blocks that are asked for again."""

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        self._seen: dict[Key, None] = {}
        self._most_keys = most_keys
        self._share = 1.0
        self._weight = _PRIOR_BLOCKS

    @property
    def share(self) -> float:
        """Blocks of prompts that had been seen before, over all of them; 1 at the start."""
        return self._share

    def asked(self, keys: Sequence[Key]) -> None:
        """A new request's prompt has these blocks."""
        known = sum(key in self._seen for key in keys)
        if keys:
            self._weight = min(_MEMORY_BLOCKS, self._weight + len(keys))
            step = min(1.0, len(keys) / self._weight)
            self._share += step * (known / len(keys) - self._share)

    def met(self, keys: Iterable[Key]) -> None:
        """These blocks exist now; whoever asks for them next asks again."""
        for key in keys:
            self._seen.pop(key, None)
            self._seen[key] = None
        while len(self._seen) > self._most_keys:
            del self._seen[next(iter(self._seen))]

    def worth_saving(self, keys: Sequence[Key], save_ratio: float) -> int:
        """How many of `keys`, from the first, to save; called before `met`.

        `save_ratio` is what saving a block costs over what its reuse spares.
        """
        if save_ratio <= _MIN_RATIO or self._share >= save_ratio:
            return len(keys)
        return next((i for i, key in enumerate(keys) if key not in self._seen), len(keys))
