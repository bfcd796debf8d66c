"""Models by name: the fields of their `config.json` that matter, and their published sizes.

Read by the same code as a user's own config. Fields are from the models' configs as kept by
AIConfigurator and Transformers, the rest from memory; parameter counts as published.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvist.cost.lookup import find, normal
from kvist.cost.model import ModelShape, shape_from_config
from kvist.cost.parameters import Parameters


@dataclass(frozen=True, slots=True)
class Entry:
    """One model: its name as published, billions of parameters, and its config."""

    name: str
    total_b: float
    active_b: float
    config: dict[str, Any] = field(hash=False)

    @property
    def published(self) -> Parameters:
        return Parameters(int(self.total_b * 1e9), int(self.active_b * 1e9))


def _gqa(
    kind: str, layers: int, hidden: int, heads: tuple[int, int, int], forward: int, vocab: int,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    query, kv, size = heads
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": query,
        "num_key_value_heads": kv,
        "head_dim": size,
        "intermediate_size": forward,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
        **more,
    }


def _moe(experts: int, chosen: int, size: int, **more: Any) -> dict[str, Any]:
    return {
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": size,
        **more,
    }


def _mla(query_rank: int, nope: int, value: int, **more: Any) -> dict[str, Any]:
    return {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": query_rank,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
        "n_shared_experts": 1,
        **more,
    }


def _delta(layers: int, value_heads: int) -> dict[str, Any]:
    """Qwen3-Next and Qwen3.5: three gated delta nets, then one layer that sees all."""
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    return {
        "layer_types": kinds * (layers // 4),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "attn_output_gate": True,
    }


def _windows(layers: int, window: int, every: int) -> dict[str, Any]:
    """`every - 1` layers with a window, then one that sees all."""
    kinds = ["sliding_attention"] * (every - 1) + ["full_attention"]
    return {"sliding_window": window, "layer_types": kinds * (layers // every)}


_QWEN_VOCAB, _QWEN35_VOCAB = 151936, 248320
_KIMI = _gqa("kimi_k2", 61, 7168, (64, 64, 112), 18432, 163840,
             **_moe(384, 8, 2048, first_k_dense_replace=1), **_mla(1536, 128, 128))  # fmt: skip
_DEEPSEEK = _gqa("deepseek_v3", 61, 7168, (128, 128, 56), 18432, 129280,
                 **_moe(256, 8, 2048, first_k_dense_replace=3), **_mla(1536, 128, 128))  # fmt: skip
_GLM5 = _gqa("glm_moe_dsa", 78, 6144, (64, 64, 64), 12288, 154880,
             **_moe(256, 8, 2048, first_k_dense_replace=3), **_mla(2048, 192, 256),
             index_topk=2048, index_n_heads=32, index_head_dim=128)  # fmt: skip
# One head size for all layers: the published config gives the five full layers other heads.
_GEMMA4 = _gqa("gemma4_text", 30, 2816, (16, 8, 256), 2112, 262144, tie_word_embeddings=True,
               **_moe(128, 8, 704), **_windows(30, 1024, 6))  # fmt: skip

_ENTRIES = (
    Entry("Llama-2-7B", 6.74, 6.74, _gqa("llama", 32, 4096, (32, 32, 128), 11008, 32000)),
    Entry("Llama-2-13B", 13.0, 13.0, _gqa("llama", 40, 5120, (40, 40, 128), 13824, 32000)),
    Entry("Llama-2-70B", 69.0, 69.0, _gqa("llama", 80, 8192, (64, 8, 128), 28672, 32000)),
    Entry("Llama-3-8B", 8.03, 8.03, _gqa("llama", 32, 4096, (32, 8, 128), 14336, 128256)),
    Entry("Llama-3-70B", 70.6, 70.6, _gqa("llama", 80, 8192, (64, 8, 128), 28672, 128256)),
    Entry("Llama-3.1-405B", 406, 406, _gqa("llama", 126, 16384, (128, 8, 128), 53248, 128256)),
    Entry("Mistral-7B", 7.25, 7.25, _gqa("mistral", 32, 4096, (32, 8, 128), 14336, 32768)),
    Entry("Mixtral-8x7B", 46.7, 12.9, _gqa("mixtral", 32, 4096, (32, 8, 128), 14336, 32000,
          num_local_experts=8, num_experts_per_tok=2)),
    Entry("Qwen2.5-7B", 7.62, 7.62, _gqa("qwen2", 28, 3584, (28, 4, 128), 18944, 152064)),
    Entry("Qwen2.5-72B", 72.7, 72.7, _gqa("qwen2", 80, 8192, (64, 8, 128), 29568, 152064)),
    Entry("Qwen3-8B", 8.19, 8.19, _gqa("qwen3", 36, 4096, (32, 8, 128), 12288, _QWEN_VOCAB)),
    Entry("Qwen3-32B", 32.8, 32.8, _gqa("qwen3", 64, 5120, (64, 8, 128), 25600, _QWEN_VOCAB)),
    Entry("Qwen3-30B-A3B", 30.5, 3.3, _gqa("qwen3_moe", 48, 2048, (32, 4, 128), 6144,
          _QWEN_VOCAB, **_moe(128, 8, 768))),
    Entry("Qwen3-235B-A22B", 235, 22, _gqa("qwen3_moe", 94, 4096, (64, 4, 128), 12288,
          _QWEN_VOCAB, **_moe(128, 8, 1536))),
    Entry("Qwen3-Coder-480B-A35B", 480, 35, _gqa("qwen3_moe", 62, 6144, (96, 8, 128), 8192,
          _QWEN_VOCAB, **_moe(160, 8, 2560))),
    Entry("Qwen3-Next-80B-A3B", 80, 3.9, _gqa("qwen3_next", 48, 2048, (16, 2, 256), 5120,
          _QWEN_VOCAB, **_moe(512, 10, 512, shared_expert_intermediate_size=512),
          **_delta(48, 32))),
    Entry("Qwen3.5-27B", 27, 27, _gqa("qwen3_5_text", 64, 5120, (24, 4, 256), 17408,
          _QWEN35_VOCAB, **_delta(64, 48))),
    Entry("Qwen3.5-122B-A10B", 122, 10, _gqa("qwen3_5_moe_text", 48, 3072, (32, 2, 256), 3072,
          _QWEN35_VOCAB, **_moe(256, 8, 1024, shared_expert_intermediate_size=1024),
          **_delta(48, 64))),
    Entry("Qwen3.5-397B-A17B", 397, 17, _gqa("qwen3_5_moe_text", 60, 4096, (32, 2, 256), 4096,
          _QWEN35_VOCAB, **_moe(512, 10, 1024, shared_expert_intermediate_size=1024),
          **_delta(60, 64))),
    Entry("DeepSeek-V3", 671, 37, _DEEPSEEK),
    Entry("DeepSeek-R1", 671, 37, _DEEPSEEK),
    Entry("Kimi-K2", 1026, 32, _KIMI),
    Entry("GLM-5", 744, 40, _GLM5),
    Entry("gpt-oss-120b", 116.8, 5.1, _gqa("gpt_oss", 36, 2880, (64, 8, 64), 2880, 201088,
          num_local_experts=128, num_experts_per_tok=4, **_windows(36, 128, 2))),
    Entry("gpt-oss-20b", 20.9, 3.6, _gqa("gpt_oss", 24, 2880, (64, 8, 64), 2880, 201088,
          num_local_experts=32, num_experts_per_tok=4, **_windows(24, 128, 2))),
    Entry("gemma-4-26B-A4B", 26, 4, _GEMMA4),
    Entry("SmolLM2-135M", 0.1345, 0.1345, _gqa("llama", 30, 576, (9, 3, 64), 1536, 49152,
          tie_word_embeddings=True)),
)  # fmt: skip
MODELS = {normal(e.name): e for e in _ENTRIES}
_FAMILY = {
    "llama-3.1-8b": "llama-3-8b",
    "llama3-8b": "llama-3-8b",
    "llama-3.1-70b": "llama-3-70b",
    "llama-3.3-70b": "llama-3-70b",
    "llama3-70b": "llama-3-70b",
    "llama-3-405b": "llama-3.1-405b",
    "mistral-7b-v0.3": "mistral-7b",
    "qwen3-coder-480b": "qwen3-coder-480b-a35b",
    "qwen3.5-122b": "qwen3.5-122b-a10b",
    "qwen3.5-397b": "qwen3.5-397b-a17b",
}
_SUFFIXES = ("-hf", "-instruct", "-chat", "-it", "-base", "-thinking", "-fp8", "-0324")


def entry(name: str) -> Entry:
    """The catalogue's entry for `name`: `Llama-3-70B`, `meta-llama/Llama-3.1-8B-Instruct`, ...

    Raises:
        UnsupportedError: no such model; the line names the nearest.
    """
    spelt = normal(name).removeprefix("meta-")
    for suffix in _SUFFIXES:
        spelt = spelt.removesuffix(suffix)
    spelt = _FAMILY.get(spelt, spelt)
    if spelt in MODELS:
        return MODELS[spelt]
    remedy = "give the path of its config.json"
    return find(name, MODELS, what="model", path="$.model", remedy=remedy)


def model(name: str, *, kv_dtype: str = "auto") -> ModelShape:
    """The shape of a model of the catalogue.

    Raises:
        UnsupportedError: no such model.
        ConfigError: an unknown `kv_dtype`.
    """
    found = entry(name)
    return shape_from_config(
        found.config, name=found.name, kv_dtype=kv_dtype, published=found.published
    )
