"""The lookup benchmark: it knows what is cached, so it would see what is missed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvist.accel.blend.spans import FoundSpan, SpanIndex
from kvist.bench.blend import lookup


def test_everything_that_was_planted_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lookup.json"
    args = ["--spans", "3000", "--tokens", "2000", "--prompts", "4", "--json", str(file)]
    code = lookup.main(args)
    document = json.loads(file.read_text())
    assert document["met"] == (code == 0)
    assert [each["missed_tokens"] for each in document["lookups"]] == [0, 0]
    assert all(each["planted_tokens"] > 3000 for each in document["lookups"])
    ratios = [each["cached_ratio"] for each in document["lookups"]]
    assert ratios == pytest.approx([0.5, 1.0], abs=0.15)
    assert document["index"]["spans"] >= 3000
    assert "nothing missed" in capsys.readouterr().out


def test_what_is_missed_is_counted() -> None:
    places = [(0, 100), (150, 250), (300, 310)]
    span = FoundSpan(10, 200, 0, (), 16)
    assert lookup.missed([span], places, 48) == 10 + 50
    assert lookup.missed([], places, 48) == 200
    assert lookup.missed([], [], 48) == 0


def test_an_index_that_crowds_out_owners_still_has_one_of_each() -> None:
    texts = lookup.Texts(5)
    index = SpanIndex(owners=1, secret=b"s")
    _, sequences = lookup.fill(index, texts, 2000)
    assert index.stats().crowded_marks > 0
    looked = lookup.look_up(
        index, texts, sequences, name="", prompts=5, tokens=3000, cached_ratio=0.9
    )
    assert looked.missed_tokens == 0


def test_prompts_say_truly_where_cached_passages_stand() -> None:
    texts = lookup.Texts(1)
    stored = np.concatenate([texts.sequence(n)[1] for n in range(3)]).tobytes()
    rng = np.random.default_rng(2)
    prompt, places = lookup.prompt_of(texts, 3, rng, tokens=3000, cached_ratio=0.5)
    assert len(prompt) == 3000
    assert places
    assert all(prompt[start:stop].tobytes() in stored for start, stop in places)
