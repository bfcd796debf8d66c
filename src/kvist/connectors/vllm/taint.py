"""Which pages of the engine's own prefix cache hold blended KV.

vLLM keeps every full page for the next request that begins with the same tokens, blended ones too.
Whatever is computed on top of them is no ordinary KV either, and is never saved. A blended request
is remembered by vLLM's own hash of its first blended page: who hits any later page hits that one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Taint:
    """First blended pages by their hash, the least recently used dropped first.

    A page that is dropped must be gone from the engine's cache: with `most` not below the engine's
    pages it is, since the engine drops its least recently used page first as well.
    """

    def __init__(self, most: int) -> None:
        self._most = max(1, most)
        self._pages: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, page_hash: bytes) -> None:
        """This page is blended, and whatever comes after it."""
        self._pages[page_hash] = None
        self._pages.move_to_end(page_hash)
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)

    def first(self, page_hashes: Sequence[bytes], pages: int) -> int | None:
        """Index of the first blended page among the first `pages`, which the engine has hit."""
        if not self._pages:
            return None
        for i, page_hash in enumerate(page_hashes[:pages]):
            if page_hash in self._pages:
                self._pages.move_to_end(page_hash)
                return i
        return None
