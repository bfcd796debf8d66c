"""Blend in a real engine: prompts made of text that was cached behind other text.

The right answer to a prompt is that of the same engine under a salt of its own, where nothing is
found. At ratio 1 everything is computed again, so answers must be equal; below it they may differ.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import VllmEngine, kvist, random_tokens

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]

BLOCK = 32
WAIT_S = 60.0
_salts = (f"alone-{i}" for i in itertools.count())


def passages(seed: int, tokens: int = 150) -> list[list[int]]:
    return [random_tokens(1000 * seed + i, tokens) for i in range(5)]


def permuted(seed: int, order: tuple[int, ...] = (3, 1, 4, 0, 2)) -> list[int]:
    """The passages in another order than `serve` has them, and a question."""
    texts = passages(seed)
    return [t for i in order for t in texts[i]] + random_tokens(seed + 7, 20)


def blending(ssd: Path | None = None, **knobs: Any) -> dict[str, Any]:
    """`kv_transfer_config` of an engine that blends."""
    engine = {k: knobs.pop(k) for k in ("dram", "connector", "module") if k in knobs}
    config = kvist(ssd, **engine)
    blend = {"enabled": True, "ratio": 1.0, "min_tokens": 64, "max_deviation": 1e9, **knobs}
    config["kv_connector_extra_config"]["blend"] = blend
    return config


def serve(engine: VllmEngine, seed: int, salt: str = "") -> None:
    """An earlier request with the passages in their own order, behind other text; all saved."""
    engine.generate([random_tokens(seed + 3, 40) + joined(passages(seed))], max_tokens=1, salt=salt)
    engine.reset()  # succeeds once no page is held for a save


def joined(texts: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(texts))


def count(engine: VllmEngine, outcome: str) -> float:
    return engine.metrics().get(f"kvist_blend_requests.{outcome}", 0.0)


def right(engine: VllmEngine, prompts: list[list[int]], max_tokens: int = 12) -> list[list[int]]:
    """Answers for which nothing was found."""
    return engine.generate(prompts, max_tokens=max_tokens, salt=next(_salts)).tokens


@pytest.fixture(scope="module")
def exact(start_engine: Any) -> VllmEngine:
    """An engine that computes everything again."""
    engine: VllmEngine = start_engine(kv_transfer_config=blending())
    return engine


def test_at_ratio_one_a_permuted_prompt_is_blended_and_answers_are_equal(exact: VllmEngine) -> None:
    serve(exact, 1)
    prompt = permuted(1)
    before = exact.metrics().get("kvist_blended_tokens", 0.0)
    answer = exact.generate([prompt], max_tokens=12)
    assert count(exact, "blended") == 1
    blended = exact.metrics()["kvist_blended_tokens"] - before
    assert blended > 0.8 * len(prompt)
    assert answer.cached[0] >= blended
    assert answer.tokens == right(exact, [prompt])
    assert "Answers change" in exact.log_text()


def test_what_the_engine_has_itself_is_used_as_it_is(exact: VllmEngine) -> None:
    """The first passages are a prefix in vLLM's own cache, the next in Kvist's, the rest spans."""
    serve(exact, 2)
    texts = passages(2)
    head = random_tokens(2 + 3, 40) + joined(texts[:2])
    prompt = head + texts[4] + texts[3] + random_tokens(99, 15)
    exact.generate([head[:200]], max_tokens=1)
    before = count(exact, "blended")
    answer = exact.generate([prompt], max_tokens=12)
    assert count(exact, "blended") == before + 1
    exact.reset()  # now the prefix comes from the store
    again = exact.generate([prompt], max_tokens=12)
    assert count(exact, "blended") == before + 2
    assert answer.tokens == again.tokens == right(exact, [prompt])


def test_several_at_once_are_all_right(exact: VllmEngine) -> None:
    for seed in (3, 4, 5):
        serve(exact, seed)
    prompts = [permuted(s, order) for s in (3, 4, 5) for order in ((3, 1, 4, 0, 2), (2, 0, 1))]
    prompts += [random_tokens(900 + i, 120) for i in range(3)]  # these find nothing
    before = count(exact, "blended")
    answers = exact.generate(prompts, max_tokens=12)
    assert count(exact, "blended") - before >= 5
    assert answers.tokens == right(exact, prompts)
    assert set(answers.finish) == {"length"}


def test_aborted_while_blending_leaves_nothing_behind(exact: VllmEngine) -> None:
    serve(exact, 6)
    prompts = [permuted(6, order) for order in ((3, 1, 4), (2, 0, 1), (4, 3, 2, 1, 0))]
    for after_s in (0.0, 0.05, 0.2):
        name = f"abort-{after_s}"
        ids = exact.ask("start", name=name, prompts=prompts, max_tokens=8)["ids"]
        exact.ask("abort", ids=ids, after_s=after_s)
        exact.ask("drain")
        exact.reset()  # succeeds only if no page was left behind
    answer = exact.generate(prompts, max_tokens=12)
    assert answer.tokens == right(exact, prompts)
    assert set(answer.finish) == {"length"}


def test_another_salt_finds_no_span(exact: VllmEngine) -> None:
    serve(exact, 7, salt="alice")
    before = count(exact, "blended")
    exact.generate([permuted(7)], max_tokens=2, salt="mallory")
    assert count(exact, "blended") == before
    exact.generate([permuted(7)], max_tokens=2, salt="alice")
    assert count(exact, "blended") == before + 1


def test_at_a_small_ratio_it_is_served_and_nothing_of_it_is_ever_saved(
    start_engine: Any, tmp_path: Path
) -> None:
    """Whoever reads these blocks later, without blend, must get right answers."""
    ssd = tmp_path / "ssd"
    engine = start_engine(kv_transfer_config=blending(ssd, ratio=0.15))
    serve(engine, 1)
    prompt = permuted(1)
    want = right(engine, [prompt], 40)
    answer = engine.generate([prompt], max_tokens=40)
    assert answer.finish == ["length"]
    assert count(engine, "blended") == 1
    assert 0 < engine.metrics()["kvist_repaired_tokens"] < 0.3 * len(prompt)
    # vLLM's own cache has blended pages now; what is computed on them is no ordinary KV either
    follow = prompt + answer.tokens[0] + random_tokens(5, 70)
    engine.generate([follow], max_tokens=40)
    want += right(engine, [follow], 40)
    engine.reset()
    engine.close()
    plain = start_engine(kv_transfer_config=kvist(ssd, restore=1.0))
    assert plain.generate([prompt], max_tokens=40).tokens == want[:1]
    assert plain.loaded_tokens() == 0  # no block of it was there, under no salt
    plain.reset()
    assert plain.generate([follow], max_tokens=40).tokens == want[1:]


def test_blocks_evicted_or_corrupt_below_dram_only_cost_the_blend(
    start_engine: Any, tmp_path: Path
) -> None:
    """DRAM holds a few blocks; on disk, every second block of the passages is spoiled."""
    ssd = tmp_path / "ssd"
    engine = start_engine(kv_transfer_config=blending(ssd, dram="48MiB"))
    serve(engine, 1)
    for i in range(4):  # pushes the passages out of DRAM
        engine.generate([random_tokens(500 + i, 900)], max_tokens=1)
    time.sleep(1.0)
    files = sorted(ssd.rglob("*.kvs"))
    assert files
    block_bytes = 30 * 2 * 3 * BLOCK * 64 * 4
    for file in files:
        size = file.stat().st_size
        with file.open("r+b") as raw:
            for at in range(block_bytes // 2, size, 2 * block_bytes):
                raw.seek(at)
                raw.write(b"spoiled!" * 64)
    engine.reset()
    prompt = permuted(1)
    answer = engine.generate([prompt], max_tokens=12)
    assert answer.tokens == right(engine, [prompt])
    assert answer.finish == ["length"]


def test_too_much_deviation_is_computed_whole_and_counted(start_engine: Any) -> None:
    engine = start_engine(kv_transfer_config=blending(ratio=0.15, max_deviation=1e-9))
    serve(engine, 1)
    prompt = permuted(1)
    answer = engine.generate([prompt], max_tokens=12)
    assert count(engine, "deviates") == 1
    assert count(engine, "blended") == 0
    assert answer.tokens == right(engine, [prompt])
    engine.reset()
    assert engine.generate([prompt], max_tokens=12).tokens == answer.tokens  # saved as it should be
    assert engine.loaded_tokens() > 0


def test_a_worker_that_fails_costs_a_recompute_and_no_request(start_engine: Any) -> None:
    engine = start_engine(
        kv_transfer_config=blending(
            ratio=0.15, connector="FaultyBlendConnector", module="faulty_connector"
        )
    )
    serve(engine, 1)
    prompts = [permuted(1), permuted(1, (2, 0, 1))]
    answer = engine.generate(prompts, max_tokens=12)
    assert set(answer.finish) == {"length"}
    assert answer.tokens == right(engine, prompts)
    assert count(engine, "failed") == 2
    engine.reset()
    assert engine.generate(prompts, max_tokens=12).tokens == answer.tokens


ROPES: dict[str, dict[str, Any]] = {
    "qwen2": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 512,
    },
    "qwen3": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
    "mistral": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}


@pytest.fixture(params=sorted(ROPES))
def small_model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random model of one family, each with another scaling of its rotation."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(
        request.param,
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        sliding_window=None,
        rope_parameters=ROPES[request.param],
        dtype="float32",
    )
    folder = tmp_path / request.param
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_families_and_rotations_are_blended_and_equal_at_ratio_one(
    start_engine: Any, small_model: Path
) -> None:
    engine = start_engine(model=small_model, kv_transfer_config=blending(dram="64MiB"))
    assert "blend is on" in engine.log_text()
    texts = [random_tokens(70 + i, 100, 1000) for i in range(4)]
    engine.generate([random_tokens(60, 30, 1000) + joined(texts)], max_tokens=1)
    engine.reset()
    prompt = texts[2] + texts[0] + texts[3] + random_tokens(61, 20, 1000)
    answer = engine.generate([prompt], max_tokens=12)
    assert count(engine, "blended") == 1
    assert answer.tokens == right(engine, [prompt])


def test_a_model_that_is_not_known_has_blend_off_and_works(
    start_engine: Any, tmp_path: Path
) -> None:
    """Olmo2 norms what attention gives, not what it is given."""
    import torch
    from transformers import Olmo2Config, Olmo2ForCausalLM

    torch.manual_seed(7)
    config = Olmo2Config(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
        dtype="float32",
    )
    folder = tmp_path / "olmo2"
    Olmo2ForCausalLM(config).save_pretrained(folder)
    engine = start_engine(model=folder, kv_transfer_config=blending(dram="64MiB"))
    assert "blend is off" in engine.log_text()
    texts = [random_tokens(70 + i, 100, 1000) for i in range(3)]
    engine.generate([joined(texts)], max_tokens=1)
    engine.reset()
    prompt = texts[2] + texts[0] + random_tokens(61, 20, 1000)
    assert engine.generate([prompt], max_tokens=8).tokens == right(engine, [prompt], 8)
    assert count(engine, "blended") == 0
