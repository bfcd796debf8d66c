"""What Kvist must know of a vLLM configuration, and what it refuses to serve.

Refusals happen at start-up with one line; nothing unsupported is ever served silently wrong.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvist.connectors.identity import fingerprint, keyspace_for, model_layout, weights_id
from kvist.connectors.plan import BlockGeometry
from kvist.core.errors import ConfigError, LayoutError, UnsupportedError
from kvist.core.layout import BlockLayout, HeadSlice

SUPPORTED_VLLM = "0.32"
_SUPPORTED_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
_FP8 = {"fp8": "float8_e4m3", "fp8_e4m3": "float8_e4m3", "fp8_e5m2": "float8_e5m2"}


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine, in Kvist's terms."""

    layout: BlockLayout
    geometry: BlockGeometry
    fingerprint: bytes
    world_size: int
    tp_size: int


def check_version(version: str) -> None:
    """Raises:
    UnsupportedError: the connector was not written for this vLLM.
    """
    if not re.match(re.escape(SUPPORTED_VLLM) + r"(\.|$)", version):
        raise UnsupportedError(
            f"vLLM {version} is not supported",
            remedy=f"install vllm {SUPPORTED_VLLM} (pip install 'kvist[vllm]')",
        )


def read_facts(vllm_config: Any, kv_cache_config: Any, block_tokens: int) -> EngineFacts:
    """Reads a started engine's configuration.

    Raises:
        UnsupportedError: a model or setting whose KV Kvist cannot share rightly.
    """
    spec = _single_spec(kv_cache_config)
    _check_parallel(vllm_config.parallel_config)
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise UnsupportedError(
            "KV scales computed at run time change the KV bytes from run to run",
            path="--calculate-kv-scales",
            remedy="use scales from the checkpoint, or an unquantised KV cache",
        )
    kv_dtype = kv_dtype_name(cache.cache_dtype, model.dtype)
    geometry = BlockGeometry(block_tokens, spec.block_size)
    layout = model_layout(model.hf_config, block_tokens, kv_dtype)
    _check_layout(layout, spec, vllm_config)
    keyspace = keyspace_for(
        model.hf_config,
        weights=_weights(vllm_config),
        block_tokens=block_tokens,
        kv_dtype=kv_dtype,
        activation_dtype=_dtype_name(model.dtype),
        quantisation=_quantisation(model, cache),
        rope_regime=f"vllm:max_model_len={model.max_model_len}",
    )
    parallel = vllm_config.parallel_config
    return EngineFacts(
        layout,
        geometry,
        fingerprint(keyspace),
        parallel.world_size,
        parallel.tensor_parallel_size,
    )


def kv_dtype_name(cache_dtype: str, model_dtype: Any) -> str:
    """The KV dtype's canonical name, e.g. `bfloat16`.

    Raises:
        UnsupportedError: a KV cache dtype that Kvist does not know.
    """
    if cache_dtype == "auto":
        return _dtype_name(model_dtype)
    name = _FP8.get(cache_dtype, cache_dtype)
    if name in ("bfloat16", "float16", "float32", "float8_e4m3", "float8_e5m2"):
        return name
    raise UnsupportedError(
        f"KV cache dtype {cache_dtype!r} is not supported",
        path="--kv-cache-dtype",
        remedy="use auto, fp8_e4m3 or fp8_e5m2",
    )


def layer_index(name: str) -> int:
    """Global index of a layer from its vLLM name (`model.layers.7.self_attn.attn`).

    Raises:
        LayoutError: the name holds no index, or more than one.
    """
    numbers = re.findall(r"\.(\d+)(?=\.|$)", name)
    if len(numbers) != 1:
        raise LayoutError(f"cannot tell the layer index from {name!r}")
    return int(numbers[0])


def rank_heads(layout: BlockLayout, tp_rank: int, tp_size: int) -> HeadSlice:
    """The canonical heads that a rank holds; an MLA latent is held whole by every rank."""
    return HeadSlice(0, 1) if layout.kinds == 1 else layout.head_slice(tp_rank, tp_size)


def _single_spec(kv_cache_config: Any) -> Any:
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(g.kv_cache_spec).__name__ for g in groups})
    if len(groups) != 1:
        raise UnsupportedError(
            f"the model has {len(groups)} KV cache groups ({', '.join(kinds)})",
            remedy="start vLLM with --disable-hybrid-kv-cache-manager, or without Kvist",
        )
    spec = groups[0].kv_cache_spec
    if kinds[0] not in _SUPPORTED_SPECS:
        raise UnsupportedError(
            f"KV cache kind {kinds[0]} (sliding window, state space or packed) is not supported",
            remedy="serve this model without Kvist",
        )
    if getattr(spec, "attention_chunk_size", None):
        raise UnsupportedError(
            "chunked local attention is not supported", remedy="serve this model without Kvist"
        )
    return spec


def _check_parallel(parallel: Any) -> None:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedError(
                f"{name}={getattr(parallel, name)} is not supported",
                path="--" + name.replace("_", "-"),
                remedy="set it to 1",
            )
    if getattr(parallel, "nnodes", 1) > 1:
        raise UnsupportedError(
            "an engine that spans hosts is not supported", remedy="keep its ranks on one host"
        )


def _check_layout(layout: BlockLayout, spec: Any, vllm_config: Any) -> None:
    """What we derived from config.json must be what the engine allocates."""
    tp = vllm_config.parallel_config.tensor_parallel_size
    want = 1 if layout.kinds == 1 else layout.head_slice(0, tp).count
    if spec.num_kv_heads != want or spec.head_size != layout.head_dim:
        raise UnsupportedError(
            f"the engine keeps {spec.num_kv_heads} KV heads of size {spec.head_size} a rank, "
            f"the model's config says {want} of {layout.head_dim}",
            remedy="serve this model without Kvist and report it",
        )


def _weights(vllm_config: Any) -> str:
    model = vllm_config.model_config
    if str(vllm_config.load_config.load_format) in ("dummy", "LoadFormat.DUMMY"):
        return f"dummy:{uuid.uuid4().hex}"  # made-up weights are never shared
    commit = getattr(model.hf_config, "_commit_hash", None)
    if not Path(model.model).is_dir():
        if commit:
            return f"commit:{commit}"
        raise ConfigError(
            f"cannot identify the weights of {model.model!r}",
            path="--model",
            remedy="give a local folder, or a hub model with a known commit",
        )
    return weights_id(model.model, commit)


def _quantisation(model: Any, cache: Any) -> dict[str, object] | None:
    parts = {
        "weights": model.quantization,
        "kv": None if cache.cache_dtype == "auto" else cache.cache_dtype,
    }
    return {k: v for k, v in parts.items() if v is not None} or None


def _dtype_name(dtype: Any) -> str:
    return str(dtype).rsplit(".", maxsplit=1)[-1]
