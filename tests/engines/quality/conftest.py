"""A tiny Llama with random weights and a tokenizer of characters: seconds, no download."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest

_LETTERS = "\n" + string.printable[:95]


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    """Four layers, two KV heads, a vocabulary of 97; attention strong enough to matter."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.25,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """One token a character; whatever is not printable ASCII is `?`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {letter: number for number, letter in enumerate(dict.fromkeys(_LETTERS))}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


@pytest.fixture(scope="session")
def tiny_folder(
    tiny_model: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The two as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_model.save_pretrained(str(folder))
    tiny_tokenizer.save_pretrained(str(folder))
    return folder
