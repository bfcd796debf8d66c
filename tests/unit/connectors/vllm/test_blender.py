"""The worker's blend, on a decoder of a few lines: from arena slots to an engine's pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny_decoder import VOCABULARY, TinyDecoder, dense

from kvist.accel.blend.relocate import relocate
from kvist.connectors.pages import TensorView, strided_map
from kvist.connectors.plan import BlockGeometry
from kvist.connectors.vllm.blender import CpuBlender
from kvist.connectors.vllm.engine_facts import EngineFacts
from kvist.connectors.vllm.messages import BlendJob, RowRun
from kvist.connectors.vllm.movers import CpuPages
from kvist.core.errors import LayoutError, LeaseError
from kvist.core.layout import BlockLayout
from kvist.native import Direction
from kvist.tiers.dram import Arena

BLOCK, PAGE = 8, 4
SLOT_BYTES = 1 << 16
PAGES = 40


@dataclass
class Bench:
    """A decoder, an arena with blocks of texts computed alone, and pages full of rubbish."""

    model: TinyDecoder
    layout: BlockLayout
    arena: Arena
    pages: CpuPages
    caches: dict[str, torch.Tensor]
    blender: CpuBlender
    used: int = 0

    def kv(self, tokens: list[int]) -> torch.Tensor:
        """`[layers, 2, kv_heads, tokens, dim]` of a whole pass."""
        keys, values, _ = dense(self.model, torch.tensor(tokens))
        return torch.stack([keys, values], dim=1)

    def store(self, tokens: list[int]) -> list[int]:
        """Computes a text alone and puts its whole blocks in slots."""
        kv, slots = self.kv(tokens), []
        for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
            view = self.arena.view(self.used)[: self.layout.block_bytes]
            torch.frombuffer(view, dtype=torch.float32).copy_(
                kv[:, :, :, at : at + BLOCK].contiguous().view(-1)
            )
            slots.append(self.used * SLOT_BYTES)
            self.used += 1
        return slots

    def read(self, pages: list[int]) -> torch.Tensor:
        """What the engine would see."""
        lay = self.layout
        kv = torch.zeros(lay.layers, 2, lay.kv_heads, len(pages) * PAGE, lay.head_dim)
        self.pages.move(Direction.GATHER, kv, pages)
        return kv

    def write(self, kv: torch.Tensor, pages: list[int]) -> None:
        self.pages.move(Direction.SCATTER, kv.contiguous(), pages)


@pytest.fixture
def bench() -> Iterator[Bench]:
    model = TinyDecoder()
    shape = model.shape
    layout = BlockLayout(shape.layers, shape.kv_heads, shape.head_dim, BLOCK, "float32")
    facts = EngineFacts(layout, BlockGeometry(BLOCK, PAGE), bytes(32), 1, 1)
    caches = {
        f"model.layers.{i}.self_attn.attn": torch.full(
            (PAGES, shape.kv_heads, PAGE, 2 * shape.head_dim), 7.0
        )
        for i in range(shape.layers)
    }
    first = next(iter(caches.values()))
    view = TensorView(tuple(first.shape), tuple(first.stride()))
    pages = CpuPages(caches, facts, strided_map(view, layout, shape.kv_heads, PAGE))
    arena = Arena(32 * SLOT_BYTES, slot_bytes=SLOT_BYTES)
    blender = CpuBlender(model, torch.float32, arena, layout, pages)
    yield Bench(model, layout, arena, pages, caches, blender)
    arena.close()


def text(seed: int, tokens: int) -> list[int]:
    make = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (tokens,), generator=make).tolist()


PROMPT = text(1, 8) + text(2, 16) + text(3, 3) + text(4, 21)  # 48 tokens
TABLE = [30, 2, 9, 31, 5, 17, 3, 22, 8, 11, 19, 4]


def job(bench: Bench, ratio: float = 1.0, bound: float = 1e9, **fields: Any) -> BlendJob:
    """The first text is an exact prefix; the others are spans, the last from behind two tokens."""
    exact = bench.store(text(1, 8))
    second = bench.store(text(2, 16))
    third = bench.store(text(9, 2) + text(4, 21))  # 16 of its 23 tokens are whole blocks
    runs = (
        RowRun(0, 8, 0, 0, tuple(exact)),
        RowRun(8, 24, 0, 0, tuple(second)),
        RowRun(27, 41, 2, 2, tuple(third)),
    )
    return BlendJob(
        **{
            "job_id": 1, "req_id": "a", "tokens": tuple(PROMPT), "computed_tokens": 0,
            "exact_tokens": 8, "runs": runs, "pages": tuple(TABLE), "ratio": ratio,
            "most_deviation_ratio": bound, **fields,
        }
    )  # fmt: skip


def test_computing_all_again_gives_the_kv_of_a_whole_pass(bench: Bench) -> None:
    note = bench.blender.blend(job(bench))
    assert note.blended
    torch.testing.assert_close(bench.read(TABLE), bench.kv(PROMPT), rtol=1e-4, atol=1e-4)


def test_rows_that_are_not_repaired_are_the_stored_ones_moved(bench: Bench) -> None:
    note = bench.blender.blend(job(bench, ratio=1e-9))
    assert note.blended
    found, stored = bench.read(TABLE), bench.kv(text(9, 2) + text(4, 21))[:, :, :, 2:16]
    here, there = torch.arange(27, 41), torch.arange(2, 16)
    last = bench.layout.layers - 1
    moved = relocate(stored[last, 0], there, here, bench.model.rope(last))
    same = (found[last, 0, :, 27:41] - moved).abs().amax(dim=(0, 2)) < 1e-5
    assert int(same.sum()) >= 13  # one row is computed at the least
    assert int((found[last, 1, :, 27:41] == stored[last, 1]).all(-1).all(0).sum()) >= 13


def test_rows_in_no_span_are_computed(bench: Bench) -> None:
    """They have the KV of a pass that sees the others as they are stored: nothing is left over."""
    bench.blender.blend(job(bench, ratio=1e-9))
    found = bench.read(TABLE)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(
        found[0, :, :, 24:27], bench.kv(PROMPT)[0, :, :, 24:27], rtol=1e-4, atol=1e-4
    )
    assert not torch.equal(found[3, :, :, 24:27], torch.full_like(found[3, :, :, 24:27], 7.0))


def test_what_the_engine_computed_is_read_from_its_pages_and_left_alone(bench: Bench) -> None:
    whole = bench.kv(PROMPT)
    bench.write(whole[:, :, :, :8], TABLE[:2])
    asked = job(bench, computed_tokens=8)
    asked = job(bench, computed_tokens=8, runs=asked.runs[1:])
    before = bench.read(TABLE[:2])
    assert bench.blender.blend(asked).blended
    assert torch.equal(bench.read(TABLE[:2]), before)
    torch.testing.assert_close(bench.read(TABLE), whole, rtol=1e-4, atol=1e-4)


def test_too_much_deviation_is_computed_whole(bench: Bench) -> None:
    note = bench.blender.blend(job(bench, ratio=0.2, bound=1e-12))
    assert not note.blended
    assert note.deviation_ratio > 0
    torch.testing.assert_close(bench.read(TABLE), bench.kv(PROMPT), rtol=1e-4, atol=1e-4)


def test_other_pages_are_not_touched(bench: Bench) -> None:
    others = [page for page in range(PAGES) if page not in TABLE]
    bench.blender.blend(job(bench))
    assert torch.equal(bench.read(others), torch.full_like(bench.read(others), 7.0))


def test_blocks_of_another_arena_are_refused(bench: Bench) -> None:
    """After a node gave way to the next, the same offsets would be other blocks."""
    before = bench.read(list(range(PAGES)))
    base = bench.arena.size_bytes
    moved = CpuBlender(
        bench.model, torch.float32, bench.arena, bench.layout, bench.pages, base=base
    )
    asked = job(bench)
    with pytest.raises(LeaseError):
        moved.blend(asked)
    assert torch.equal(bench.read(list(range(PAGES))), before)
    runs = tuple(
        dataclasses.replace(run, slots=tuple(s + base for s in run.slots)) for run in asked.runs
    )
    with pytest.raises(LeaseError):
        bench.blender.blend(dataclasses.replace(asked, runs=runs))
    assert torch.equal(bench.read(list(range(PAGES))), before)
    assert moved.blend(dataclasses.replace(asked, runs=runs)).blended
    torch.testing.assert_close(bench.read(TABLE), bench.kv(PROMPT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pages": tuple(TABLE[:-1])},
        {"pages": ()},
        {"computed_tokens": 3},
        {"runs": (RowRun(8, 40, 0, 0, (0, SLOT_BYTES)),), "exact_tokens": 0},  # too few blocks
        {"runs": (RowRun(8, 24, 0, 0, (0, SLOT_BYTES)),)},  # no prefix
        {"runs": (RowRun(0, 4, 0, 0, (0,)), RowRun(8, 24, 0, 0, (0, SLOT_BYTES)))},  # half of it
        {"runs": (RowRun(0, 8, 8, 0, (0,)),)},  # a prefix from elsewhere
        {"runs": (RowRun(0, 8, 0, 0, (0,)), RowRun(7, 15, 0, 0, (0,)))},
        {"runs": (RowRun(0, 8, 0, 0, (0,)), RowRun(45, 53, 0, 0, (0,)))},
    ],
)
def test_a_job_that_does_not_add_up_writes_nothing(bench: Bench, wrong: dict[str, Any]) -> None:
    before = bench.read(list(range(PAGES)))
    with pytest.raises(LayoutError):
        bench.blender.blend(job(bench, **wrong))
    assert torch.equal(bench.read(list(range(PAGES))), before)
