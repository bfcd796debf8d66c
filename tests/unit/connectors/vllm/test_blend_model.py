"""Which engines, layers and rotations blend takes, and how it finds the engine's decoder."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kvist.connectors.vllm.blend_model import _rope
from kvist.connectors.vllm.engine_model import check_attention, check_engine, engine_model
from kvist.core.errors import UnsupportedError


def vllm_class(name: str, base: type, module: str) -> Any:
    """A class that says it is vLLM's."""
    return type(name, (base,), {"__module__": module})


class Attention(nn.Module):
    """As a layer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Identity()


class Layer(nn.Module):
    """A decoder layer; `kind` is set by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()


def decoder(layer: Any, layers: int = 2) -> nn.Module:
    found = nn.Module()
    found.embed_tokens = nn.Identity()
    found.layers = nn.ModuleList([layer() for _ in range(layers)])
    return found


LLAMA = vllm_class("LlamaDecoderLayer", Layer, "vllm.model_executor.models.llama")


def attentions(model: Any) -> dict[str, nn.Module]:
    return {f"model.layers.{i}": layer.self_attn.attn for i, layer in enumerate(model.layers)}


def test_the_decoder_is_the_one_that_holds_the_engines_own_layers() -> None:
    first, second = decoder(LLAMA), decoder(LLAMA)
    assert engine_model(attentions(first)) is first
    assert engine_model(attentions(second)) is second


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("Olmo2DecoderLayer", "vllm.model_executor.models.olmo2"),
        ("LlamaDecoderLayer", "somebody.models.llama"),
    ],
)
def test_layers_of_another_kind_are_not_taken(name: str, module: str) -> None:
    other = decoder(vllm_class(name, Layer, module))
    with pytest.raises(UnsupportedError, match="0 decoders"):
        engine_model(attentions(other))


def test_a_decoder_with_a_layer_more_or_less_is_not_taken() -> None:
    model = decoder(LLAMA, 3)
    some = dict(list(attentions(model).items())[:2])
    with pytest.raises(UnsupportedError, match="0 decoders"):
        engine_model(some)
    gc.collect()


def engine(**changes: Any) -> Any:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1),
        lora_config=None,
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    for name, value in changes.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel_config": SimpleNamespace(world_size=2)},
        {"lora_config": object()},
        {"speculative_config": object()},
        {"cache_config": SimpleNamespace(cache_dtype="fp8")},
    ],
)
def test_engines_that_blend_cannot_serve_are_refused(changes: dict[str, Any]) -> None:
    check_engine(engine())
    with pytest.raises(UnsupportedError):
        check_engine(engine(**changes))


def attention(kind: str = "decoder", **settings: Any) -> Any:
    return SimpleNamespace(attn_type=kind, impl=SimpleNamespace(**settings))


@pytest.mark.parametrize(
    "plain", [{}, {"sliding_window": None}, {"sliding_window": (-1, -1), "logits_soft_cap": 0}]
)
def test_plain_attention_is_taken(plain: dict[str, Any]) -> None:
    check_attention(attention(**plain))


@pytest.mark.parametrize(
    "odd",
    [
        {"sliding_window": 4096},
        {"sliding_window": (4095, 0)},
        {"logits_soft_cap": 30.0},
        {"alibi_slopes": [0.5]},
        {"sinks": torch.zeros(1)},
        {"kv_sharing_target_layer_name": "model.layers.0"},
        {"kind": "encoder_only"},
        {"kind": "encoder_decoder"},
    ],
)
def test_other_attention_is_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        check_attention(attention(**odd))


class Rotary:
    """A rotation as vLLM keeps it."""

    def __init__(self, scale: float = 1.0, table_scale: float = 1.0) -> None:
        self.base, self.is_neox_style = 10_000.0, False
        self._scale = scale
        angles = torch.arange(64.0)[:, None] * self._compute_inv_freq(self.base) * table_scale
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=-1)

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        return self._scale / base ** (torch.arange(0, 8, 2).float() / 8)


PACKAGE = "vllm.model_executor.layers.rotary_embedding.base"
PLAIN = vllm_class("RotaryEmbedding", Rotary, PACKAGE)


def test_a_rotation_is_read_with_its_own_frequencies_and_style() -> None:
    rope = _rope(PLAIN(scale=0.25))
    assert rope.rotary_dim == 8
    assert rope.inverse_frequencies[0] == 0.25
    assert rope.style.value == "pairs"


def test_a_rotation_whose_table_is_another_is_refused() -> None:
    """Whatever a subclass does to its table: the keys would be turned by other angles."""
    with pytest.raises(UnsupportedError, match="table"):
        _rope(PLAIN(table_scale=1.01))


@pytest.mark.parametrize(
    "kind",
    [
        vllm_class("DynamicNTKScalingRotaryEmbedding", Rotary, PACKAGE),
        vllm_class("MRotaryEmbedding", Rotary, PACKAGE),
        vllm_class("RotaryEmbedding", Rotary, "somebody.rotary"),
    ],
)
def test_a_rotation_that_is_not_known_is_refused(kind: Any) -> None:
    with pytest.raises(UnsupportedError):
        _rope(kind())
