"""Small models with random weights, one for each family and each kind of RoPE."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_SIZE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_THETA = {"rope_theta": 10000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
    "rope_theta": 500000.0,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    **_THETA,
}
_STEADY = [1.0 + i / 8 for i in range(8)]
_LONG = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    **_THETA,
}

# name → (class prefix, settings)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("Llama", {"rope_parameters": {"rope_type": "default", **_THETA}}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **_THETA}}),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "yarn": ("Llama", {"rope_parameters": _YARN}),
    "longrope-steady": (
        "Llama",
        {"rope_parameters": _LONG | {"short_factor": _STEADY, "long_factor": _STEADY}},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "smollm3-nope": ("SmolLM3", {}),
    "partial": ("Phi3", {"partial_rotary_factor": 0.5}),
    "partial-pairs": ("Glm", {"partial_rotary_factor": 0.5, "head_dim": 16}),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **_THETA}}),
    "longrope": (
        "Llama",
        {"rope_parameters": _LONG | {"short_factor": [1.0] * 8, "long_factor": _STEADY}},
    ),
    "window": ("Mistral", {"sliding_window": 64}),
    "other family": ("Gemma", {"head_dim": 16}),
}


def tiny(name: str, dtype: Any = torch.float32) -> Any:
    """A model of `MODELS` or `REFUSED`, in eval mode; the same weights at each call."""
    family, more = (MODELS | REFUSED)[name]
    config = getattr(transformers, f"{family}Config")(**_SIZE, **more)
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that do nothing hide mistakes
            if parameter.ndim == 1:
                parameter.uniform_(0.6, 1.4)
    for parameter in model.parameters():  # not the buffers, as `from_pretrained` has it
        parameter.data = parameter.data.to(dtype)
    return model.eval()
