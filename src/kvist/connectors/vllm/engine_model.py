"""Finds the model that a vLLM worker runs, and says which models blend can compute with.

vLLM names each attention layer in its configuration but hands a connector no model. The module
tree that holds exactly those layers is looked for among the objects that Python's collector knows:
nothing of vLLM is patched, and a tree that does not hold the very objects is not taken.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from kvist.core.errors import UnsupportedError

_LAYERS = frozenset(
    {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
)
_PACKAGE = "vllm.model_executor.models."


def engine_model(attentions: Mapping[str, nn.Module]) -> nn.Module:
    """The decoder (embeddings and layers) that holds these attention layers.

    Args:
        attentions: vLLM's `static_forward_context` of the layers with KV, by name.

    Raises:
        UnsupportedError: there is no such decoder, or more than one.
    """
    wanted = {id(module) for module in attentions.values()}
    found = [
        module
        for module in _modules(gc.get_objects())
        if hasattr(module, "embed_tokens")
        and hasattr(module, "layers")
        and {id(layer.self_attn.attn) for layer in module.layers if _known(layer)} == wanted
    ]
    if len(found) != 1:
        raise UnsupportedError(
            f"{len(found)} decoders of a kind that is known hold the engine's attention layers",
            remedy="blend knows Llama, Mistral, Qwen2 and Qwen3 as vLLM writes them",
        )
    return found[0]


def _modules(objects: Iterable[object]) -> Iterable[Any]:
    """Those that are modules. Asks for the type: some objects lie about their class."""
    return (item for item in objects if issubclass(type(item), nn.Module))


def _known(layer: object) -> bool:
    kind = type(layer)
    return kind.__name__ in _LAYERS and kind.__module__.startswith(_PACKAGE)


def check_engine(vllm_config: Any) -> None:
    """Raises:
    UnsupportedError: blend cannot serve an engine with these settings.
    """
    parallel = vllm_config.parallel_config
    if parallel.world_size != 1:
        raise UnsupportedError(
            f"blend computes on one rank, the engine has {parallel.world_size}",
            remedy="serve the model on one rank, or without blend",
        )
    if vllm_config.lora_config is not None:
        raise UnsupportedError("blend and LoRA are not served together")
    if vllm_config.speculative_config is not None:
        raise UnsupportedError("blend and speculative decoding are not served together")
    if getattr(vllm_config.cache_config, "cache_dtype", "auto") != "auto":
        raise UnsupportedError("blend needs KV in the dtype in which the model computes")


def check_attention(attention: Any) -> None:
    """Raises:
    UnsupportedError: the layer attends otherwise than softmax(scale · q·k) over all before it.
    """
    impl = attention.impl
    for name, plain in (
        ("alibi_slopes", (None,)),
        ("logits_soft_cap", (None, 0, 0.0)),
        ("sinks", (None,)),
        ("sliding_window", (None, -1, (-1, -1))),
        ("kv_sharing_target_layer_name", (None,)),
    ):
        value = getattr(impl, name, None)
        if not any(value is p or (p is not None and value == p) for p in plain):
            raise UnsupportedError(f"blend does not know attention with {name}={value!r}")
    kind = getattr(attention.attn_type, "value", attention.attn_type)
    if kind != "decoder":
        raise UnsupportedError(f"blend does not know {kind} attention")
