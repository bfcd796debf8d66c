"""Transformers with Kvist: greedy float32 output equals plain `generate`, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvist.core.errors import TierError, UnsupportedError
from kvist.core.keys import RequestScope

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvist.bench.document import long_document, questions  # noqa: E402
from kvist.connectors.identity import fingerprint  # noqa: E402
from kvist.connectors.transformers import TransformersKvist, model_keyspace  # noqa: E402
from kvist.core.keyspace import Keyspace  # noqa: E402
from kvist.core.outcome import ReadTotals, Tier  # noqa: E402
from kvist.policy.leaf_lru import LeafLru  # noqa: E402
from kvist.store import TieredStore  # noqa: E402
from kvist.tiers.dram import Arena  # noqa: E402
from kvist.tiers.ssd import SsdTier  # noqa: E402

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

BLOCK = 16
NEW = 8


@pytest.fixture(scope="module")
def ids(tokenizer: Any) -> list[int]:
    return list(tokenizer.encode(long_document(300, tokenizer)))


@pytest.fixture
def kv(smollm2: Any, smollm2_folder: Path, memory_store_class: Any) -> TransformersKvist:
    return TransformersKvist.open(
        smollm2,
        store=lambda keyspace: memory_store_class(keyspace.layout.block_bytes),
        model_path=smollm2_folder,
        block_tokens=BLOCK,
    )


def row(tokens: list[int]) -> Any:
    return torch.tensor([tokens])


def plain(model: Any, tokens: list[int], new: int = NEW) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            row(tokens),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
        )
    return list(out[0].tolist())


def with_kvist(kv: TransformersKvist, tokens: list[int], new: int = NEW, **more: Any) -> list[int]:
    out = kv.generate(row(tokens), do_sample=False, max_new_tokens=new, min_new_tokens=new, **more)
    return list(out[0].tolist())


def test_cold_and_warm_output_equals_plain_generate(
    kv: TransformersKvist, smollm2: Any, ids: list[int]
) -> None:
    prompt = ids[:200]
    want = plain(smollm2, prompt)
    assert with_kvist(kv, prompt) == want
    assert kv.last.tokens_by_tier == {}
    assert kv.last.computed_tokens == 200
    assert kv.last.saved_blocks == (200 + NEW - 1) // BLOCK
    assert with_kvist(kv, prompt) == want
    assert kv.last.tokens_by_tier == {"dram": 192}
    assert kv.last.computed_tokens == 8
    assert kv.last.saved_blocks == 0
    assert kv.last.faults == {}
    assert kv.store.leases == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK])
def test_any_prompt_length_around_a_block_is_served(
    kv: TransformersKvist, smollm2: Any, ids: list[int], length: int
) -> None:
    prompt = ids[:length]
    want = plain(smollm2, prompt)
    assert with_kvist(kv, prompt) == want
    assert with_kvist(kv, prompt) == want
    # A token at least is left to compute, so an exact multiple loads one block less.
    assert sum(kv.last.tokens_by_tier.values()) == (length - 1) // BLOCK * BLOCK
    assert kv.last.faults == {}


def test_prompts_that_branch_share_only_what_is_equal(
    kv: TransformersKvist, smollm2: Any, ids: list[int]
) -> None:
    first, second = ids[:120], ids[:70] + ids[150:200]
    with_kvist(kv, first)
    assert with_kvist(kv, second) == plain(smollm2, second)
    assert kv.last.tokens_by_tier == {"dram": 64}
    assert with_kvist(kv, first) == plain(smollm2, first)
    assert kv.last.tokens_by_tier == {"dram": 112}


def test_a_second_turn_reuses_decoded_tokens(
    kv: TransformersKvist, smollm2: Any, tokenizer: Any, ids: list[int]
) -> None:
    first = with_kvist(kv, ids[:50], new=40)
    second = first + list(tokenizer.encode(questions()[0]))
    assert with_kvist(kv, second) == plain(smollm2, second)
    # 50 + 40 tokens, the last of which was never fed back: five full blocks.
    assert kv.last.tokens_by_tier == {"dram": 80}


def test_a_block_lost_between_match_and_read_is_recomputed(
    kv: TransformersKvist, smollm2: Any, ids: list[int]
) -> None:
    prompt = ids[:100]
    want = with_kvist(kv, prompt)
    kv.store.lost = 2  # type: ignore[attr-defined]
    assert with_kvist(kv, prompt) == want == plain(smollm2, prompt)
    assert kv.last.tokens_by_tier == {"dram": 32}


def test_a_broken_store_changes_no_answer_and_is_counted(
    kv: TransformersKvist, smollm2: Any, ids: list[int]
) -> None:
    kv.store.broken = TierError("gone")  # type: ignore[attr-defined]
    assert with_kvist(kv, ids[:40]) == plain(smollm2, ids[:40])
    assert kv.last.faults == {"TierError": 2}
    assert kv.last.computed_tokens == 40


def test_a_store_with_little_room_keeps_the_first_blocks(
    smollm2: Any, smollm2_folder: Path, memory_store_class: Any, ids: list[int]
) -> None:
    kv = TransformersKvist.open(
        smollm2,
        store=lambda keyspace: memory_store_class(keyspace.layout.block_bytes, room=2),
        model_path=smollm2_folder,
        block_tokens=BLOCK,
    )
    want = plain(smollm2, ids[:100])
    assert with_kvist(kv, ids[:100]) == want
    assert kv.last.saved_blocks == 2
    assert with_kvist(kv, ids[:100]) == want
    assert kv.last.tokens_by_tier == {"dram": 32}


def test_tenants_and_adapters_never_share(kv: TransformersKvist, ids: list[int]) -> None:
    with_kvist(kv, ids[:64], scope=RequestScope(salt="a"))
    for scope in (RequestScope(salt="b"), RequestScope(lora="lora:1", salt="a"), RequestScope()):
        with_kvist(kv, ids[:64], scope=scope)
        assert kv.last.tokens_by_tier == {}


def test_generate_returns_what_the_model_returns(kv: TransformersKvist, ids: list[int]) -> None:
    common: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4}
    out = kv.generate(row(ids[:40]), return_dict_in_generate=True, output_scores=True, **common)
    again = kv.generate(row(ids[:40]), **common)
    assert out.sequences.tolist() == again.tolist()
    assert len(out.scores) == 4


@pytest.mark.parametrize(
    "more",
    [
        {"num_beams": 2},
        {"use_cache": False},
        {"num_return_sequences": 2, "do_sample": True},
        {"inputs_embeds": None},
        {"past_key_values": None},
        {"attention_mask": torch.tensor([[0, 1, 1]])},
    ],
)
def test_what_keys_do_not_show_is_refused(kv: TransformersKvist, more: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=";"):
        kv.generate(row([1, 2, 3]), **more)


def test_a_batch_is_refused(kv: TransformersKvist) -> None:
    with pytest.raises(UnsupportedError, match="one row at a time"):
        kv.generate(torch.ones(2, 3, dtype=torch.long))


def test_a_sliding_window_model_is_refused() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=8,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="sliding-window"):
        TransformersKvist.open(MistralForCausalLM(config), store=None)  # type: ignore[arg-type]


def tiered(folder: Path, keyspace: Keyspace, *, slots: int = 64) -> TieredStore:
    block = keyspace.layout.block_bytes
    arena = Arena(slots * (block + 4096), slot_bytes=block)
    ssd = SsdTier.open(folder, keyspace=fingerprint(keyspace), capacity_bytes=256 << 20)
    return TieredStore(arena, LeafLru(), ssd, raw_bytes=block)


def test_a_reopened_store_serves_from_ssd_with_equal_output(
    smollm2: Any, smollm2_folder: Path, tmp_path: Path, ids: list[int]
) -> None:
    prompt = ids[:200]
    want = plain(smollm2, prompt)
    keyspace = model_keyspace(smollm2, model_path=smollm2_folder, block_tokens=BLOCK)
    for tier in (None, "ssd"):
        with tiered(tmp_path / "ssd", keyspace) as store:
            kv = TransformersKvist.open(
                smollm2, store=store, model_path=smollm2_folder, block_tokens=BLOCK,
                read_deadline_s=60,
            )  # fmt: skip
            assert with_kvist(kv, prompt) == want
            assert kv.last.tokens_by_tier == ({tier: 192} if tier else {})
            assert with_kvist(kv, prompt) == want
            assert kv.last.tokens_by_tier == {"dram": 192}
            assert kv.last.faults == {}
            assert store.flush(60)
            store.check_integrity()


def test_more_blocks_than_dram_holds_change_no_answer(
    smollm2: Any, smollm2_folder: Path, tmp_path: Path, ids: list[int]
) -> None:
    keyspace = model_keyspace(smollm2, model_path=smollm2_folder, block_tokens=BLOCK)
    with tiered(tmp_path / "ssd", keyspace, slots=4) as store:
        kv = TransformersKvist.open(
            smollm2, store=store, model_path=smollm2_folder, block_tokens=BLOCK
        )
        for start in (0, 40, 0):
            prompt = ids[start : start + 120]
            assert with_kvist(kv, prompt) == plain(smollm2, prompt)
        store.check_integrity()


def test_a_tier_slower_than_computing_is_not_read_until_it_has_recovered(
    kv: TransformersKvist, smollm2: Any, ids: list[int]
) -> None:
    store: Any = kv.store
    prompt = ids[:200]
    want = plain(smollm2, prompt)
    assert with_kvist(kv, prompt) == want
    for i in range(6):  # prompts of their own, from which the speed of computing is learned
        with_kvist(kv, [100 + i, *ids[: 40 + 20 * i]])
    store.tier = Tier.SSD
    store.totals = {Tier.SSD: ReadTotals(store.block_bytes, 10.0)}
    assert with_kvist(kv, prompt) == want
    assert kv.last.tokens_by_tier == {}
    for n in range(1, 31):  # half a second of fast reads by others, again and again
        store.totals = {Tier.SSD: ReadTotals(n * 10**10, 10.0 + n / 2)}
        kv.appraiser.read(store.totals)
    assert with_kvist(kv, prompt) == want
    assert kv.last.tokens_by_tier == {"ssd": 192}
