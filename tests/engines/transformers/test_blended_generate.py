"""`generate` with text that is cached elsewhere: what it reuses, what it never keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny
from transformers import DynamicCache

from kvist.accel.blend.budget import RatioReason
from kvist.accel.blend.transformers_model import TransformersBlendModel
from kvist.connectors.appraiser import Appraiser
from kvist.connectors.identity import fingerprint
from kvist.connectors.transformers import (
    BlendOutcome,
    BlendReport,
    BlendSettings,
    TransformersKvist,
    model_keyspace,
)
from kvist.connectors.transformers.blend import Blended
from kvist.core.errors import ConfigError, NoSpaceError, TierError
from kvist.core.keys import RequestScope, seed_bytes
from kvist.core.outcome import Tier
from kvist.cost.prefill import PrefillCoefficients
from kvist.native import digest
from kvist.policy.leaf_lru import LeafLru
from kvist.store import TieredStore
from kvist.tiers.dram import Arena
from kvist.tiers.ssd import SsdTier

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

BLOCK, NEW, VOCABULARY = 16, 6, 199
ALWAYS = BlendSettings(most_deviation_ratio=1e9, least_tokens=32)
Open = Callable[..., TransformersKvist]


def text(seed: int, tokens: int) -> list[int]:
    return torch.randint(
        3, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


PASSAGES = [text(i, 48 + 7 * i) for i in range(4)]
QUESTION = text(99, 12)
PERMUTED = [*text(77, 5), *PASSAGES[2], *PASSAGES[0], *PASSAGES[3], *QUESTION]
REUSED = sum(len(PASSAGES[i]) // BLOCK * BLOCK for i in (0, 2, 3))


@pytest.fixture(autouse=True)
def _neither_threads_nor_clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread; and no prompt is computed whole because this machine is fast at it."""
    monkeypatch.setattr(Appraiser, "settled", False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("default")


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    return Path(path)


@pytest.fixture
def opened(model: Any, folder: Path, memory_store_class: Any) -> Open:
    def open_(blend: BlendSettings | None = ALWAYS, store: Any = None) -> TransformersKvist:
        return TransformersKvist.open(
            model,
            store=store or (lambda keyspace: memory_store_class(keyspace.layout.block_bytes)),
            model_path=folder,
            block_tokens=BLOCK,
            blend=blend,
        )

    return open_


@pytest.fixture
def kv(opened: Open) -> TransformersKvist:
    """A store that holds the passages, each from a prompt that began with it."""
    kv = opened()
    for passage in PASSAGES:
        generate(kv, passage, new=1)
    return kv


def generate(kv: TransformersKvist, tokens: list[int], new: int = NEW, **more: Any) -> list[int]:
    row = torch.tensor([tokens])
    out = kv.generate(row, do_sample=False, max_new_tokens=new, min_new_tokens=new, **more)
    return list(out[0].tolist())


def plain(model: Any, tokens: list[int]) -> list[int]:
    row = torch.tensor([tokens])
    mask = torch.ones_like(row)
    with torch.no_grad():
        out = model.generate(
            row, attention_mask=mask, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW
        )
    return list(out[0].tolist())


def held(kv: TransformersKvist) -> dict[bytes, bytes]:
    return {key: bytes(block) for key, block in kv.store.blocks.items()}  # type: ignore[attr-defined]


def test_passages_in_another_order_come_from_the_store(kv: TransformersKvist) -> None:
    out = generate(kv, PERMUTED)
    assert out[: len(PERMUTED)] == PERMUTED
    assert len(out) == len(PERMUTED) + NEW
    report = kv.last.blend
    assert report.outcome is BlendOutcome.BLENDED
    assert report.blended_tokens == REUSED
    assert 0 < report.repaired_tokens < REUSED
    assert report.ratio == 0.15
    assert kv.last.computed_tokens == len(PERMUTED) - REUSED + report.repaired_tokens
    assert kv.last.tokens_by_tier == {}
    assert kv.last.faults == {}
    assert kv.store.leases == 0  # type: ignore[attr-defined]


def test_nothing_blended_is_saved_nor_what_was_decoded_on_top(
    kv: TransformersKvist, opened: Open, model: Any
) -> None:
    before = held(kv)
    answer = generate(kv, PERMUTED, new=40)
    assert kv.last.blend.outcome is BlendOutcome.BLENDED
    assert kv.last.saved_blocks == 0
    assert held(kv) == before
    # Whoever asks without blend gets what a whole pass gives, also for the next turn.
    without = opened(blend=None, store=kv.store)
    assert generate(without, PERMUTED) == plain(model, PERMUTED)
    assert without.last.tokens_by_tier == {}
    assert generate(without, answer) == plain(model, answer)


def test_the_prefix_comes_first_and_spans_after(
    kv: TransformersKvist, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[int] = []
    project = TransformersBlendModel.project

    def watched(self: Any, layer: int, hidden: Any, positions: Any) -> Any:
        first.append(int(positions[0]))
        return project(self, layer, hidden, positions)

    monkeypatch.setattr(TransformersBlendModel, "project", watched)
    prompt = [*PASSAGES[1], *PASSAGES[2], *PASSAGES[0], *QUESTION]
    generate(kv, prompt)
    prefix = len(PASSAGES[1]) // BLOCK * BLOCK
    assert kv.last.tokens_by_tier == {"dram": prefix}
    reused = sum(len(PASSAGES[i]) // BLOCK * BLOCK for i in (0, 2))
    assert kv.last.blend.blended_tokens == reused
    assert min(first) == prefix  # what matched is not computed


def test_a_prompt_that_matches_as_a_prefix_is_exact(kv: TransformersKvist, model: Any) -> None:
    prompt = [*PASSAGES[3], *QUESTION]
    assert generate(kv, prompt) == plain(model, prompt)
    assert kv.last.blend.outcome is BlendOutcome.NOTHING_FOUND


def test_a_passage_that_comes_twice_is_reused_twice(kv: TransformersKvist) -> None:
    generate(kv, [*text(5, 9), *PASSAGES[0], *text(6, 9), *PASSAGES[0], *QUESTION])
    assert kv.last.blend.blended_tokens == 2 * (len(PASSAGES[0]) // BLOCK * BLOCK)


@pytest.mark.parametrize("scope", [RequestScope(salt="b"), RequestScope(lora="b")], ids=str)
def test_scopes_do_not_see_each_others_text(
    kv: TransformersKvist, model: Any, scope: RequestScope
) -> None:
    assert generate(kv, PERMUTED, scope=scope) == plain(model, PERMUTED)
    assert kv.last.blend.outcome is BlendOutcome.NOTHING_FOUND


def test_too_much_deviation_gives_the_answer_of_a_whole_pass_and_keeps_it(
    opened: Open, model: Any
) -> None:
    kv = opened(BlendSettings(most_deviation_ratio=0.0, least_tokens=32))
    for passage in PASSAGES:
        generate(kv, passage, new=1)
    assert generate(kv, PERMUTED) == plain(model, PERMUTED)
    assert kv.last.blend.outcome is BlendOutcome.DEVIATES
    counts = {BlendOutcome.NOTHING_FOUND: len(PASSAGES), BlendOutcome.DEVIATES: 1}
    assert kv.blend_outcomes == counts
    assert kv.last.blend.blended_tokens == 0
    assert kv.last.computed_tokens == len(PERMUTED)
    assert kv.last.saved_blocks == (len(PERMUTED) + NEW - 1) // BLOCK
    assert generate(kv, PERMUTED) == plain(model, PERMUTED)
    assert sum(kv.last.tokens_by_tier.values()) == (len(PERMUTED) - 1) // BLOCK * BLOCK


def test_evicted_spans_are_misses(kv: TransformersKvist, model: Any) -> None:
    kv.store.blocks.clear()  # type: ignore[attr-defined]
    assert generate(kv, PERMUTED) == plain(model, PERMUTED)
    assert kv.last.blend.outcome is BlendOutcome.NOTHING_FOUND
    assert kv._blender is not None
    # What was looked for and not there is forgotten; the prompt itself is saved by now.
    known = (len(PERMUTED) + NEW - 1) // BLOCK + len(PASSAGES[1]) // BLOCK
    assert kv._blender.index.stats().blocks == known


def test_blocks_lost_between_match_and_read_are_computed(kv: TransformersKvist, model: Any) -> None:
    kv.store.lost = 0  # type: ignore[attr-defined]
    assert generate(kv, PERMUTED) == plain(model, PERMUTED)
    assert kv.last.blend.outcome is BlendOutcome.LOST
    assert kv.store.leases == 0  # type: ignore[attr-defined]


def test_a_store_that_loses_the_end_of_each_span_gives_the_rest(kv: TransformersKvist) -> None:
    kv.store.lost = 2  # type: ignore[attr-defined]
    generate(kv, PERMUTED)
    assert kv.last.blend.outcome is BlendOutcome.BLENDED
    assert kv.last.blend.blended_tokens == 3 * 2 * BLOCK


def test_text_whose_blocks_are_gone_is_taken_from_where_else_it_is_stored(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gone between the match and the read: only then is it known that the other place is needed."""
    kv = opened()
    blender = kv._blender
    assert blender is not None
    with monkeypatch.context() as exact:
        exact.setattr(blender, "blend", lambda *_: BlendReport())
        generate(kv, [*text(555, 32), *PASSAGES[3]], new=1)
        elsewhere = set(held(kv))
        generate(kv, PASSAGES[3], new=1)
    gone = set(held(kv)) - elsewhere
    read = kv.store.read

    def losing(keys: list[bytes], *, deadline_s: float) -> Any:
        for key in gone:
            kv.store.blocks.pop(key, None)  # type: ignore[attr-defined]
        return read(keys, deadline_s=deadline_s)

    kv.store.read = losing  # type: ignore[assignment, method-assign]
    generate(kv, [*text(31, 7), *PASSAGES[3], *QUESTION])
    assert kv.last.blend.outcome is BlendOutcome.BLENDED
    assert kv.last.blend.blended_tokens >= 48


def test_a_broken_store_changes_no_answer_and_is_counted(kv: TransformersKvist, model: Any) -> None:
    kv.store.broken = TierError("gone")  # type: ignore[attr-defined]
    assert generate(kv, PERMUTED) == plain(model, PERMUTED)
    assert kv.last.blend.outcome is BlendOutcome.FAILED
    assert kv.last.faults == {"TierError": 3}


def test_a_blend_that_would_not_save_time_is_not_begun(
    kv: TransformersKvist, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = PrefillCoefficients(1e-9, 1e-12, 0.0)
    monkeypatch.setattr(Appraiser, "prefill", fast)
    assert generate(kv, PERMUTED) == plain(model, PERMUTED)
    assert kv.last.blend.outcome is BlendOutcome.RECOMPUTE_FASTER
    assert kv.last.blend.reason is RatioReason.RECOMPUTE_FASTER


def test_short_finds_are_left(opened: Open, model: Any) -> None:
    kv = opened(BlendSettings(least_tokens=REUSED + 1))
    for passage in PASSAGES:
        generate(kv, passage, new=1)
    assert generate(kv, PERMUTED) == plain(model, PERMUTED)
    assert kv.last.blend.outcome is BlendOutcome.NOTHING_FOUND


def test_without_settings_nothing_is_blended(opened: Open, kv: TransformersKvist) -> None:
    without = opened(blend=None, store=kv.store)
    generate(without, PERMUTED)
    assert without.last.blend.outcome is BlendOutcome.OFF
    assert without.blend_off == "not asked for"
    assert kv.blend_off == ""


def test_a_model_that_cannot_be_blended_is_served_without_and_says_why(
    memory_store_class: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("other family")
    model.save_pretrained(tmp_path)
    kv = TransformersKvist.open(
        model,
        store=lambda keyspace: memory_store_class(keyspace.layout.block_bytes),
        model_path=tmp_path,
        block_tokens=BLOCK,
        blend=ALWAYS,
    )
    assert "GemmaForCausalLM" in kv.blend_off
    assert "blend is off" in caplog.text
    generate(kv, PASSAGES[0])
    assert generate(kv, PERMUTED) == plain(model, PERMUTED)
    assert kv.last.blend.outcome is BlendOutcome.OFF


def test_a_model_that_raises_in_the_proof_is_served_without(
    folder: Path, memory_store_class: Any
) -> None:
    odd = tiny("default")
    odd.model.layers[2].self_attn.q_norm = torch.nn.Identity()  # and no k_norm
    kv = TransformersKvist.open(
        odd,
        store=lambda keyspace: memory_store_class(keyspace.layout.block_bytes),
        model_path=folder,
        block_tokens=BLOCK,
        blend=ALWAYS,
    )
    assert "k_norm" in kv.blend_off
    assert generate(kv, PERMUTED) == plain(odd, PERMUTED)


@pytest.mark.parametrize("length", [1, 2, BLOCK, 70])
def test_short_prompts_and_repeated_ones_are_served(
    kv: TransformersKvist, model: Any, length: int
) -> None:
    prompt = text(3210, length)
    for _ in range(2):
        assert generate(kv, prompt) == plain(model, prompt)
    assert kv.last.faults == {}


def test_a_store_without_room_blends_nothing(
    opened: Open, model: Any, kv: TransformersKvist, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise NoSpaceError("full")

    monkeypatch.setattr(kv.store, "read", full)
    assert generate(kv, PERMUTED) == plain(model, PERMUTED)
    assert kv.last.blend.outcome is BlendOutcome.LOST


def test_more_repair_comes_closer_to_a_whole_pass(opened: Open, model: Any) -> None:
    """Through the store and back: KV of the blended cache against that of a whole pass."""
    tokens = PERMUTED[:-1]
    with torch.no_grad():
        want = model(torch.tensor([tokens])).past_key_values
    apart = []
    for ratio in (0.0, 0.15, 0.9):
        kv = opened(BlendSettings(floor_ratio=ratio, most_deviation_ratio=1e9, least_tokens=32))
        for passage in PASSAGES:
            generate(kv, passage, new=1)
        blender = kv._blender
        assert blender is not None
        blended = blender.blend(tokens, _seed(kv), DynamicCache(config=model.config), 0)
        assert isinstance(blended, Blended)
        assert blended.tainted
        pairs = zip(blended.cache.layers, want.layers, strict=True)
        apart.append([float((a.keys - b.keys).norm() / b.keys.norm()) for a, b in pairs])
    naive, some, most = apart
    assert sum(naive) > sum(some) > sum(most)
    assert max(some[:2]) < 1e-5  # the first layers are computed for all


def _seed(kv: TransformersKvist) -> bytes:
    return digest(seed_bytes(fingerprint(kv.keyspace), RequestScope()))


@pytest.mark.parametrize(
    "wrong", [{"floor_ratio": 1.5}, {"most_deviation_ratio": -1.0}, {"least_tokens": 0}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        BlendSettings(**wrong)  # type: ignore[arg-type]


def test_spans_come_from_the_disk_as_well(model: Any, folder: Path, tmp_path: Path) -> None:
    """An arena too small for all passages: the oldest are on the SSD alone when they are needed."""
    keyspace = model_keyspace(model, model_path=folder, block_tokens=BLOCK)
    block = keyspace.layout.block_bytes
    arena = Arena(12 * (block + 4096), slot_bytes=block)
    ssd = SsdTier.open(tmp_path, keyspace=fingerprint(keyspace), capacity_bytes=64 << 20)
    with TieredStore(arena, LeafLru(), ssd, raw_bytes=block) as store:
        kv = TransformersKvist.open(
            model, store=store, model_path=folder, block_tokens=BLOCK, blend=ALWAYS
        )
        for seed in range(40, 46):  # in all more than the arena holds
            generate(kv, text(seed, 4 * BLOCK), new=1)
            assert store.flush(60)
        generate(kv, [*text(1, 5), *text(41, 4 * BLOCK), *text(40, 4 * BLOCK), *QUESTION])
        assert kv.last.blend.outcome is BlendOutcome.BLENDED
        assert kv.last.blend.blended_tokens == 2 * 4 * BLOCK
        assert store.read_totals()[Tier.SSD].size_bytes > 0
        store.check_integrity()
