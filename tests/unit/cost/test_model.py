"""Sizes of models: published figures, the table of the workload research, and bad input."""

from __future__ import annotations

from typing import Any

import pytest

from kvist.connectors.model_settings import model_layout
from kvist.core.errors import ConfigError, UnsupportedError
from kvist.cost.catalogue import MODELS, entry, model
from kvist.cost.model import shape_from_config

KIB, MIB, GIB = 1024, 1024**2, 1024**3
K128 = 131072
# Model, KiB a token, MiB constant (without recurrent state), GiB at 128 k (to the digits printed).
TABLE = [
    ("Llama-2-7B", 512, 0, 64),
    ("Llama-2-13B", 800, 0, 100),
    ("Llama-3-8B", 128, 0, 16),
    ("Mistral-7B", 128, 0, 16),
    ("Mixtral-8x7B", 128, 0, 16),
    ("Llama-2-70B", 320, 0, 40),
    ("Llama-3-70B", 320, 0, 40),
    ("Llama-3.1-405B", 504, 0, 63),
    ("Qwen2.5-7B", 56, 0, 7),
    ("Qwen3-8B", 144, 0, 18),
    ("Qwen3-32B", 256, 0, 32),
    ("Qwen3-30B-A3B", 96, 0, 12),
    ("Qwen3-235B-A22B", 188, 0, 23.5),
    ("Qwen3-Coder-480B", 248, 0, 31),
    ("DeepSeek-V3", 68.6, 0, 8.6),
    ("DeepSeek-R1", 68.6, 0, 8.6),
    ("Kimi-K2", 68.6, 0, 8.6),
    ("GLM-5", 87.8, 0, 11),
    ("gpt-oss-120b", 36, 4.5, 4.5),
    ("gpt-oss-20b", 24, 3, 3),
    ("gemma-4-26B-A4B", 40, 200, 5.2),
    ("Qwen3.5-122B", 24, 0, 3),
    ("Qwen3.5-397B", 30, 0, 3.75),
    ("Qwen3.5-27B", 64, 0, 8),
]


@pytest.mark.parametrize(("name", "kib", "mib", "gib"), TABLE)
def test_cache_sizes_are_those_of_the_research_table(
    name: str, kib: float, mib: float, gib: float
) -> None:
    shape = model(name)
    attention = shape.token_bytes - shape.indexer_token_bytes
    assert attention / KIB == pytest.approx(kib, abs=0.06)
    assert (shape.constant_bytes - shape.state_bytes) / MIB == pytest.approx(mib)
    at_128k = shape.cache_bytes(K128) - shape.state_bytes - shape.indexer_token_bytes * K128
    assert at_128k / GIB == pytest.approx(gib, rel=0.03)


def test_llama_2_7b_at_4096_tokens_is_two_gib() -> None:
    assert model("meta-llama/Llama-2-7b-hf").cache_bytes(4096) == 2 * GIB


def test_llama_3_70b_at_128k_is_forty_gib() -> None:
    assert model("meta-llama/Meta-Llama-3-70B-Instruct").cache_bytes(K128) == 40 * GIB


def test_deepseek_v3_keeps_a_latent_of_576_elements_a_layer() -> None:
    assert model("DeepSeek-V3").token_bytes == 61 * 576 * 2


@pytest.mark.parametrize("name", sorted(MODELS))
def test_counted_parameters_agree_with_published_ones(name: str) -> None:
    found = entry(name)
    counted = shape_from_config(found.config).parameters
    assert counted.total == pytest.approx(found.published.total, rel=0.04)
    # gpt-oss publishes its active parameters without the output matrix.
    active = counted.active - (201088 * 2880 if "gpt-oss" in name else 0)
    assert active == pytest.approx(found.published.active, rel=0.07)


def test_fp8_halves_the_cache_and_fp32_checkpoints_count_as_half_precision() -> None:
    whole, half = model("Llama-3-8B"), model("Llama-3-8B", kv_dtype="fp8")
    assert half.token_bytes * 2 == whole.token_bytes
    found = {**entry("Llama-3-8B").config, "torch_dtype": "float32"}
    assert shape_from_config(found).token_bytes == whole.token_bytes


def test_ranks_split_heads_and_copy_what_cannot_be_split() -> None:
    llama, deepseek = model("Llama-3-70B"), model("DeepSeek-V3")
    assert llama.rank_token_bytes(8) * 8 == llama.token_bytes
    assert llama.rank_token_bytes(16) == llama.rank_token_bytes(8)
    assert deepseek.rank_token_bytes(8) == deepseek.token_bytes
    with pytest.raises(ConfigError, match="at least 1"):
        llama.rank_token_bytes(0)


def test_a_window_stops_growing_and_a_state_never_grows() -> None:
    window = model("gpt-oss-20b")
    assert window.cache_bytes(64) == 64 * 48 * KIB
    assert window.cache_bytes(K128 + 1) - window.cache_bytes(K128) == 24 * KIB
    hybrid = model("Qwen3-Next-80B-A3B")
    # 36 layers: 32 heads of 128 × 128 in float32, and 3 × 8,192 convolved channels in bfloat16.
    assert hybrid.state_bytes == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert hybrid.cache_bytes(0) == hybrid.state_bytes


def test_an_indexer_is_counted_beside_the_latent() -> None:
    glm = model("GLM-5")
    assert glm.indexer_token_bytes == 78 * 132
    assert glm.token_bytes == 78 * (576 * 2 + 132)


def test_prefill_flops_are_quadratic_only_where_the_whole_context_is_seen() -> None:
    llama = model("Llama-3-70B")
    n, p = 8192, 4096
    expected = 2 * 70.6e9 * (n - p) + 2 * 80 * 64 * 128 * (n**2 - p**2)
    assert llama.prefill_flops(n - p, p) == pytest.approx(expected)
    assert llama.prefill_flops(p, 0) + llama.prefill_flops(n - p, p) == pytest.approx(
        llama.prefill_flops(n, 0)
    )
    window = model("gpt-oss-20b")
    far = window.prefill_flops(1, 10**5)
    assert far == pytest.approx(window.linear_flops + window.quadratic_flops * (2 * 10**5 + 1))


@pytest.mark.parametrize("name", ["Llama-3-8B", "Qwen3-30B-A3B", "DeepSeek-V3", "SmolLM2-135M"])
def test_a_block_of_the_connectors_is_as_large_as_the_cost_model_says(name: str) -> None:
    layout = model_layout(entry(name).config, 16, "bfloat16")
    assert layout.token_bytes == model(name).token_bytes


@pytest.mark.parametrize(
    ("config", "attending", "state"),
    [
        (
            {"hybrid_override_pattern": "M-M*-M*", "mamba_num_heads": 8, "mamba_head_dim": 16,
             "ssm_state_size": 32, "n_groups": 2, "conv_kernel": 4},
            2, 3 * (128 * 32 * 4 + (128 + 128) * 3 * 2),
        ),
        (
            {"num_hidden_layers": 8, "attn_layer_period": 8, "attn_layer_offset": 4,
             "mamba_d_state": 16, "mamba_expand": 2, "mamba_d_conv": 4},
            1, 7 * (128 * 16 * 4 + 128 * 3 * 2),
        ),
        (
            {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2,
             "conv_L_cache": 3},
            2, 2 * 64 * 3 * 2,
        ),
        (
            {"num_hidden_layers": 2, "layers_block_type": ["hybrid", "mamba"],
             "mamba_d_state": 16},
            1, 2 * (128 * 16 * 4 + 128 * 3 * 2),
        ),
    ],
    ids=["nemotron-h", "jamba", "lfm2", "zamba"],
)  # fmt: skip
def test_hybrid_models_keep_kv_where_they_attend_and_a_state_elsewhere(
    config: dict[str, Any], attending: int, state: int
) -> None:
    base = {"num_hidden_layers": 7, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
    shape = shape_from_config({**base, **config})
    assert shape.token_bytes == attending * 2 * 4 * 16 * 2
    assert shape.state_bytes == state


def test_gemma_4_layers_that_see_all_may_have_other_heads() -> None:
    more = {"global_head_dim": 512, "num_global_key_value_heads": 2}
    shape = shape_from_config({**entry("gemma-4-26B-A4B").config, **more})
    assert shape.token_bytes == 5 * 2 * 2 * 512 * 2
    assert shape.constant_bytes == 200 * MIB


def test_layers_that_share_the_cache_of_others_keep_none() -> None:
    shared = {**entry("Llama-3-8B").config, "num_kv_shared_layers": 8}
    assert shape_from_config(shared).token_bytes == 96 * KIB


def test_quantised_weights_are_smaller_and_the_cache_is_not() -> None:
    config = entry("Llama-3-8B").config
    for quantised, ratio in (({"quant_method": "fp8"}, 0.5), ({"bits": 4}, 0.25)):
        shape = shape_from_config({**config, "quantization_config": quantised})
        assert shape.weight_bytes == pytest.approx(shape_from_config(config).weight_bytes * ratio)
        assert shape.token_bytes == 128 * KIB


def test_nested_and_object_configs_are_read_alike() -> None:
    config = entry("Qwen3-8B").config

    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {"model_type": "vl", "text_config": config}

    assert shape_from_config(Config()).token_bytes == model("Qwen3-8B").token_bytes


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ("llama", "a model config was expected, not str"),
        ({}, "the config has no num_hidden_layers"),
        ({"num_hidden_layers": 2, "hidden_size": 8}, "no num_attention_heads"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_key_value_heads": [1, 2]}, "differ between layers"),
        ({"swa_num_key_value_heads": 4}, "differ between layers"),
        ({"num_hidden_layers": 2, "model_type": "mamba2"}, "does not count"),
        ({"num_hidden_layers": 2, "layer_types": ["mystery", "full_attention"], "hidden_size": 8,
          "num_attention_heads": 2}, "size that the config does not say"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_sized_is_refused_in_one_line(config: Any, line: str) -> None:
    with pytest.raises(UnsupportedError, match=line) as caught:
        shape_from_config(config)
    assert "\n" not in str(caught.value)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(UnsupportedError, match="did you mean llama-3-70b"):
        model("llama-3-70bb")
    with pytest.raises(UnsupportedError, match=r"\$\.model: unknown model 'zzz'; give the path"):
        model("zzz")
    with pytest.raises(ConfigError, match="unknown dtype 'int3'"):
        model("Llama-3-8B", kv_dtype="int3")
