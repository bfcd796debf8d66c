"""Pieces between special tokens, read one by one and kept, give the tokens of the whole text."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from kvist.bench.smollm2 import cache_folder
from kvist.gateway.pieces import Pieces, reads_apart

SPECIAL = ["<|start|>", "<|end|>", "<|end|>x", "[A]"]
WORDS = [
    *("the", "harbour", "lies,", "where", "", "ferries\n\n", "wait:", "ångström", "東京", "🙂"),
    *("a1b22", "'re", "don't", "\t<|sta", "rt|>", "[A"),
]


def trained(normalizer: Any = None, pre_tokenizer: Any = None) -> Tokenizer:
    """A byte-level tokenizer with a few merges and special tokens."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    return tokenizer


def spec_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Its file."""
    spec: dict[str, Any] = json.loads(tokenizer.to_str())
    return spec


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    """What the tokenizer itself says."""
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def made_up(chance: random.Random) -> str:
    """Words and special tokens in any order, some of them long pieces that come again."""
    parts = []
    for _ in range(chance.randrange(12)):
        kind = chance.random()
        if kind < 0.3:
            parts.append(chance.choice(SPECIAL))
        elif kind < 0.6:
            parts.append(" ".join(WORDS[chance.randrange(3) :] * 3))
        else:
            parts.append(" ".join(chance.choices(WORDS, k=chance.randrange(1, 9))))
    return "".join(parts)


@pytest.mark.parametrize("kind", ["plain", "nfc", "split"])
def test_pieces_give_the_tokens_of_the_whole_text(kind: str) -> None:
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "merged_with_next"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer = {
        "plain": trained,
        "nfc": lambda: trained(normalizers.NFC()),
        "split": lambda: trained(None, split),
    }[kind]()
    assert reads_apart(spec_of(tokenizer))
    pieces, chance = Pieces(tokenizer, spec_of(tokenizer)), random.Random(kind)
    for _ in range(400):
        text = made_up(chance)
        assert pieces.tokens(text) == whole(tokenizer, text), text
    assert pieces.kept_bytes > 0


def test_the_longest_special_token_is_taken() -> None:
    tokenizer = trained()
    text = "a<|end|>xb<|end|>y"
    assert Pieces(tokenizer, spec_of(tokenizer)).tokens(text) == whole(tokenizer, text)


def test_what_was_read_is_not_read_again() -> None:
    tokenizer = trained()

    class Counting:
        def __init__(self) -> None:
            self.read: list[str] = []

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            self.read += texts
            return tokenizer.encode_batch_fast(texts, **options)

    counting: Any = Counting()
    pieces = Pieces(counting, spec_of(tokenizer))
    turns = [f"turn {n}: " + " ".join(WORDS * 3) for n in range(4)]
    for number in range(1, 5):
        text = "<|start|>" + "<|end|>".join(turns[:number])
        assert pieces.tokens(text) == whole(tokenizer, text)
    assert counting.read == turns


def test_no_more_is_kept_than_was_allowed() -> None:
    tokenizer = trained()
    pieces = Pieces(tokenizer, spec_of(tokenizer), most_bytes=20_000)
    for number in range(200):
        text = f"{number} " + " ".join(WORDS * 2)
        assert pieces.tokens(text) == whole(tokenizer, text)
        assert 0 < pieces.kept_bytes <= 20_000
    huge = "x " * 20_000
    assert pieces.tokens(huge) == whole(tokenizer, huge)
    assert pieces.kept_bytes <= 20_000


def test_threads_read_the_same() -> None:
    tokenizer = trained()
    pieces = Pieces(tokenizer, spec_of(tokenizer), most_bytes=20_000)
    wrong: list[str] = []

    def read(seed: int) -> None:
        chance = random.Random(seed % 2)
        for _ in range(100):
            text = made_up(chance)
            if pieces.tokens(text) != whole(tokenizer, text):
                wrong.append(text)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pieces.kept_bytes <= 20_000


def test_tokenizers_that_look_beyond_a_piece_are_told_apart() -> None:
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first")
    assert not reads_apart(spec_of(trained(None, metaspace)))
    prefixed = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert not reads_apart(spec_of(trained(None, prefixed)))
    nested = pre_tokenizers.Sequence([pre_tokenizers.Digits(), prefixed])
    assert not reads_apart(spec_of(trained(None, nested)))
    assert not reads_apart(spec_of(trained(normalizers.Prepend("▁"))))
    stripping = trained()
    stripping.add_special_tokens([AddedToken("<s>", lstrip=True)])
    assert not reads_apart(spec_of(stripping))
    normalized = trained()
    normalized.add_tokens([AddedToken("word", normalized=True)])
    assert not reads_apart(spec_of(normalized))
    cut = trained()
    cut.enable_truncation(10)
    assert not reads_apart(spec_of(cut))


DEMO = cache_folder() / "smollm2-135m-float32"


@pytest.mark.skipif(not DEMO.is_dir(), reason="the demo model was not built")
def test_the_demo_model_s_pieces_give_the_tokens_of_the_whole_text() -> None:
    file = Path(DEMO / "tokenizer.json").read_bytes()
    tokenizer, spec = Tokenizer.from_buffer(file), json.loads(file)
    assert reads_apart(spec)
    pieces, chance = Pieces(tokenizer, spec), random.Random(5)
    for _ in range(100):
        text = made_up(chance).replace("<|start|>", "<|im_start|>").replace("<|end|>", "<|im_end|>")
        assert pieces.tokens(text) == whole(tokenizer, text), text
