"""What is read of a vLLM configuration, and every refusal."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvist.connectors.vllm.engine_facts import (
    check_version,
    kv_dtype_name,
    layer_index,
    rank_heads,
    read_facts,
)
from kvist.core.errors import ConfigError, LayoutError, UnsupportedError
from kvist.core.layout import BlockLayout, HeadSlice

HF = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 256,
    "head_dim": 32,
    "vocab_size": 100,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
}


class FullAttentionSpec(SimpleNamespace):
    """Recognised by its name, as vLLM's own is."""


class SlidingWindowSpec(SimpleNamespace):
    """A kind that is refused."""


class _Config(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(HF)


def spec(cls: type[SimpleNamespace] = FullAttentionSpec, **fields: Any) -> SimpleNamespace:
    return cls(**{"block_size": 32, "num_kv_heads": 4, "head_size": 32, **fields})


def groups(*specs: SimpleNamespace) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=s) for s in specs])


def engine(folder: Path, **changes: Any) -> Any:
    """A configuration; `changes` are fields of whichever part has them."""
    parallel = {
        "tensor_parallel_size": 1,
        "world_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "nnodes": 1,
    }
    cache = {"cache_dtype": "auto", "calculate_kv_scales": False}
    model = {
        "dtype": torch.float32,
        "hf_config": _Config(_commit_hash="a" * 40),
        "model": str(folder),
        "quantization": None,
        "max_model_len": 1024,
    }
    parts: list[dict[str, Any]] = [parallel, cache, model]
    for name, value in changes.items():
        (home,) = [p for p in parts if name in p] or [{}]
        home[name] = value
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(**cache),
        model_config=SimpleNamespace(**model),
        load_config=SimpleNamespace(load_format=changes.get("load_format", "auto")),
    )


def test_facts_of_an_ordinary_engine_are_read(tmp_path: Path) -> None:
    facts = read_facts(engine(tmp_path), groups(spec()), 64)
    assert facts.layout == BlockLayout(2, 4, 32, 64, "float32")
    assert facts.geometry.pages_per_block == 2
    assert (facts.world_size, facts.tp_size) == (1, 1)
    assert len(facts.fingerprint) == 32


def test_ranks_do_not_change_the_fingerprint(tmp_path: Path) -> None:
    one = read_facts(engine(tmp_path), groups(spec()), 64)
    two = read_facts(
        engine(tmp_path, tensor_parallel_size=2, world_size=2), groups(spec(num_kv_heads=2)), 64
    )
    assert one.fingerprint == two.fingerprint
    assert two.tp_size == 2


@pytest.mark.parametrize(
    ("change", "value"),
    [("dtype", torch.bfloat16), ("cache_dtype", "fp8"), ("quantization", "awq")],
)
def test_what_changes_kv_bytes_changes_the_fingerprint(
    tmp_path: Path, change: str, value: Any
) -> None:
    one = read_facts(engine(tmp_path), groups(spec()), 64)
    other = read_facts(engine(tmp_path, **{change: value}), groups(spec()), 64)
    assert one.fingerprint != other.fingerprint


def test_made_up_weights_are_shared_with_nobody(tmp_path: Path) -> None:
    made = [
        read_facts(engine(tmp_path, load_format="dummy"), groups(spec()), 64).fingerprint
        for _ in range(2)
    ]
    assert made[0] != made[1]


def test_hub_model_without_a_commit_is_refused() -> None:
    config = engine(Path("nowhere/at-all"), hf_config=_Config(_commit_hash=None))
    with pytest.raises(ConfigError, match="cannot identify the weights"):
        read_facts(config, groups(spec()), 64)


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ((spec(), spec()), "2 KV cache groups"),
        ((spec(), spec(SlidingWindowSpec)), "2 KV cache groups"),
        ((spec(SlidingWindowSpec),), "SlidingWindowSpec"),
        ((spec(attention_chunk_size=64),), "chunked local attention"),
        ((spec(num_kv_heads=8),), "keeps 8 KV heads"),
        ((spec(head_size=64),), "of size 64"),
        ((spec(block_size=48),), "not a multiple"),
    ],
)
def test_kv_caches_that_kvist_cannot_share_are_refused(
    tmp_path: Path, specs: tuple[SimpleNamespace, ...], text: str
) -> None:
    with pytest.raises(UnsupportedError, match=text):
        read_facts(engine(tmp_path), groups(*specs), 64)


@pytest.mark.parametrize(
    ("change", "value", "text"),
    [
        ("decode_context_parallel_size", 2, "decode_context_parallel_size=2"),
        ("prefill_context_parallel_size", 2, "prefill_context_parallel_size=2"),
        ("nnodes", 2, "spans hosts"),
        ("calculate_kv_scales", True, "KV scales computed at run time"),
        ("cache_dtype", "int4_odd", "int4_odd"),
    ],
)
def test_settings_that_kvist_cannot_serve_are_refused(
    tmp_path: Path, change: str, value: Any, text: str
) -> None:
    with pytest.raises(UnsupportedError, match=text):
        read_facts(engine(tmp_path, **{change: value}), groups(spec()), 64)


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.32.1", "0.32.0.dev3"])
def test_supported_version_is_accepted_in_every_spelling(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.320.0", "1.0.32", "dev", ""])
def test_other_version_is_refused_with_the_remedy(version: str) -> None:
    with pytest.raises(UnsupportedError, match=r"install vllm 0\.32"):
        check_version(version)


@pytest.mark.parametrize(
    ("cache_dtype", "want"),
    [
        ("auto", "bfloat16"),
        ("fp8", "float8_e4m3"),
        ("fp8_e4m3", "float8_e4m3"),
        ("fp8_e5m2", "float8_e5m2"),
        ("float16", "float16"),
    ],
)
def test_kv_dtype_has_one_name_for_each_spelling(cache_dtype: str, want: str) -> None:
    assert kv_dtype_name(cache_dtype, torch.bfloat16) == want


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model.layers.7.self_attn.attn", 7),
        ("language_model.model.layers.12.self_attn.attn", 12),
        ("transformer.h.0.attn", 0),
        ("layers.3", 3),
    ],
)
def test_layer_index_is_the_number_in_the_name(name: str, index: int) -> None:
    assert layer_index(name) == index


@pytest.mark.parametrize("name", ["model.attn", "model.layers.1.experts.2.attn", "layer7.attn"])
def test_layer_name_without_exactly_one_index_is_refused(name: str) -> None:
    with pytest.raises(LayoutError, match="layer index"):
        layer_index(name)


def test_latent_is_held_whole_by_every_rank() -> None:
    latent = BlockLayout(2, 1, 576, 64, "bfloat16", kinds=1)
    assert rank_heads(latent, 3, 8) == HeadSlice(0, 1)
    heads = BlockLayout(2, 8, 64, 64, "bfloat16")
    assert rank_heads(heads, 1, 2) == HeadSlice(4, 4)
