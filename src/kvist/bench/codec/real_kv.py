"""KV of the demo model over a text, as canonical blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvist.bench.smollm2 import ensure_smollm2
from kvist.core.errors import ConfigError
from kvist.core.layout import BlockLayout

_CONTEXT_TOKENS = 1024
_SOURCES = ("README.md", "ARCHITECTURE.md", "docs/*.md")


def default_text() -> str:
    """This project's own documents, or where only the package is installed, its sources."""
    package = Path(__file__).resolve().parents[2]
    root = package.parents[1]
    paths = [path for pattern in _SOURCES for path in sorted(root.glob(pattern))]
    paths = paths or sorted(package.rglob("*.py"))
    return "\n\n".join(path.read_text(errors="replace") for path in paths)


def collect(text: str, *, blocks: int, block_tokens: int) -> tuple[BlockLayout, list[bytes]]:
    """`blocks` blocks of bfloat16 KV, the demo model having read `text` in parts of 1024 tokens.

    Raises:
        ConfigError: the `demo` extra is missing, or the text is too short.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as exc:
        raise ConfigError(
            "the benchmark needs a model", remedy="pip install 'kvist[demo]'"
        ) from exc
    folder = str(ensure_smollm2("bfloat16"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[0]
    context = _CONTEXT_TOKENS // block_tokens * block_tokens
    if len(ids) < blocks * block_tokens:
        raise ConfigError(f"a text of {len(ids)} tokens does not fill {blocks} blocks")
    found: list[bytes] = []
    layout = None
    with torch.no_grad():
        for part in ids[: blocks * block_tokens].split(context):
            layers = model(part[None], use_cache=True).past_key_values.layers
            shape = layers[0].keys.shape
            layout = BlockLayout(len(layers), shape[1], shape[3], block_tokens, "bfloat16")
            found += _blocks(layers, block_tokens)
    assert layout is not None
    return layout, found


def _blocks(layers: Any, block_tokens: int) -> Iterator[bytes]:
    import torch

    kv = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in layers])
    for block in kv.split(block_tokens, dim=3):
        yield block.contiguous().view(torch.uint8).numpy().tobytes()
