"""The demo model, built once a session, and a store in plain memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from kvist.core.errors import ConfigError, LeaseError, NoSpaceError
from kvist.core.keys import Key
from kvist.core.outcome import BlockRef, Match, Outcome, ReadTotals, Tier


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The folder of SmolLM2-135M in float32; skips where it cannot be had (no network)."""
    from kvist.bench.smollm2 import ensure_smollm2

    try:
        return ensure_smollm2("float32")
    except ConfigError as e:
        pytest.skip(f"no demo model: {e}")


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> Any:
    """The model in float32 on the CPU, in eval mode."""
    import torch
    from transformers import AutoModelForCausalLM

    # On a busy machine, threads that wait for each other are far slower than one.
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(str(smollm2_folder), dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="session")
def tokenizer(smollm2_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2_folder))


class _Lease:
    def __init__(self, store: MemoryStore, keys: Sequence[Key]) -> None:
        self._store = store
        self._keys = list(keys)
        self._buffers: dict[int, bytearray] = {}
        self._open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.release()

    def __len__(self) -> int:
        return len(self._keys)

    def release(self) -> None:
        if self._open:
            self._open = False
            self._store.leases -= 1

    def slot(self, i: int) -> int:
        raise LeaseError("this store has no arena")

    def buffer(self, i: int) -> memoryview:
        if not self._open or i not in self._buffers:
            raise LeaseError(f"no slot for block {i}")
        return memoryview(self._buffers[i])


class _Read(_Lease):
    def __init__(self, store: MemoryStore, keys: Sequence[Key]) -> None:
        super().__init__(store, keys)
        lost = store.lost
        self._buffers = {
            i: store.blocks[k]
            for i, k in enumerate(keys)
            if k in store.blocks and (lost is None or i < lost)
        }

    def outcome(self, i: int) -> Outcome:
        return Outcome.HIT if i in self._buffers else Outcome.MISS

    def wait(self, i: int, *, timeout_s: float | None = None) -> Outcome:
        return self.outcome(i)

    def ready(self) -> bool:
        return True

    def hits(self) -> int:
        return next((i for i in range(len(self)) if i not in self._buffers), len(self))


class _Write(_Lease):
    def __init__(self, store: MemoryStore, blocks: Sequence[BlockRef]) -> None:
        super().__init__(store, [b.key for b in blocks])
        self._present = [b.key in store.blocks for b in blocks]
        self._buffers = {
            i: bytearray(store.block_bytes) for i, there in enumerate(self._present) if not there
        }

    def present(self, i: int) -> bool:
        return self._present[i]

    def commit(self, i: int, *, checksum: int | None = None) -> bool:
        self._store.blocks.setdefault(self._keys[i], self._buffers[i])
        return True


class MemoryStore:
    """The store's contract over a dict; faults on demand.

    `lost`: reads miss from that block on, though `match` promised them. `broken`: every call
    raises. `leases` counts those not yet released.
    """

    def __init__(self, block_bytes: int, room: int = 1000) -> None:
        self.block_bytes = block_bytes
        self.blocks: dict[Key, bytearray] = {}
        self.lost: int | None = None
        self.broken: Exception | None = None
        self.leases = 0
        self.tier = Tier.DRAM
        self.totals: dict[Tier, ReadTotals] = {}
        self._room = room

    def match(self, keys: Sequence[Key]) -> Match:
        self._fail()
        run = next((i for i, k in enumerate(keys) if k not in self.blocks), len(keys))
        return Match((self.tier,) * run)

    def read(self, keys: Sequence[Key], *, deadline_s: float) -> _Read:
        self._fail()
        self.leases += 1
        return _Read(self, keys)

    def write(self, blocks: Sequence[BlockRef]) -> _Write:
        self._fail()
        if len(blocks) > self._room:
            raise NoSpaceError("full")
        self.leases += 1
        return _Write(self, blocks)

    def read_totals(self) -> dict[Tier, ReadTotals]:
        return self.totals

    def prefetch(self, keys: Sequence[Key], *, deadline_s: float) -> int:
        return 0

    def room_blocks(self) -> int:
        return self._room

    def _fail(self) -> None:
        if self.broken is not None:
            raise self.broken


@pytest.fixture
def memory_store_class() -> type[MemoryStore]:
    return MemoryStore
