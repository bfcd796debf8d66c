"""Prompts of passages: the same every time, passages that stand where they say, clear refusals."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvist.bench.blend.prompts import passage_prompts
from kvist.core.errors import ConfigError


class Words:
    def encode(self, text: str) -> list[int]:
        return [sum(map(ord, word)) for word in text.split()]


def test_made_up_prompts_are_the_same_every_time_and_differ_from_each_other() -> None:
    first = passage_prompts(Words(), count=5, passages=4, passage_tokens=50)
    assert passage_prompts(Words(), count=5, passages=4, passage_tokens=50) == first
    assert len({prompt.passages for prompt in first}) == 5
    assert len({prompt.name for prompt in first}) == 5


def test_passages_stand_where_they_say() -> None:
    for prompt in passage_prompts(Words(), count=3, passages=4, passage_tokens=30):
        tokens = prompt.tokens
        for (start, stop), passage in zip(prompt.spans(), prompt.passages, strict=True):
            assert tuple(tokens[start:stop]) == passage
            assert 0 < stop - start <= 30
        assert tokens[stop:] == list(prompt.question)


@pytest.mark.parametrize("name", ["t.json.gz", "t.jsonl.gz"])
def test_a_file_of_questions_and_passages_is_read(tmp_path: Path, name: str) -> None:
    rows = [
        {"question": f"q{i}", "ctxs": [{"text": f"text {i} {j}"} for j in range(1 + i)]}
        for i in range(4)
    ]
    lines = "\n".join(map(json.dumps, rows))
    with gzip.open(tmp_path / name, "wt") as file:
        file.write(lines if name.endswith(".jsonl.gz") else json.dumps(rows))
    found = passage_prompts(Words(), count=2, passages=3, passage_tokens=9, texts=tmp_path / name)
    assert [len(prompt.passages) for prompt in found] == [3, 3]  # rows with fewer are left out
    with pytest.raises(ConfigError, match="2 prompts, not 3"):
        passage_prompts(Words(), count=3, passages=3, passage_tokens=9, texts=tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"no json", b'[{"question": "q"}]', b"[1]"])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(ConfigError, match=r"t\.json\.gz"):
        passage_prompts(Words(), count=1, passages=1, passage_tokens=9, texts=path)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"t\.json\.gz"):
        passage_prompts(Words(), count=1, passages=1, passage_tokens=9, texts=path)
