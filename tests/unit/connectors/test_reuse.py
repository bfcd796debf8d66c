"""The share of blocks that are asked for again, and what is saved because of it."""

from __future__ import annotations

import pytest

from kvist.connectors.reuse import ReuseWatch


def _keys(prompt: int, blocks: int = 16) -> list[bytes]:
    return [f"{prompt}/{i}".encode() for i in range(blocks)]


def _serve(watch: ReuseWatch, prompt: int, ratio: float = 0.05) -> int:
    keys = _keys(prompt)
    watch.asked(keys)
    worth = watch.worth_saving(keys, ratio)
    watch.met(keys)
    return worth


def test_an_empty_cache_proves_nothing() -> None:
    watch = ReuseWatch()
    assert _serve(watch, 0) == 16


def test_the_share_falls_with_evidence_only() -> None:
    watch = ReuseWatch()
    shares = []
    for prompt in range(100):
        _serve(watch, prompt)
        shares.append(watch.share)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(64 / (64 + 16))
    assert shares[-1] == pytest.approx(64 / (64 + 1600))


def test_traffic_that_repeats_keeps_its_share() -> None:
    watch = ReuseWatch()
    for turn in range(200):
        _serve(watch, turn // 2)  # every prompt comes twice
    assert 0.4 < watch.share < 0.6


def test_a_prefix_that_was_seen_is_worth_saving_and_what_follows_it_is_not() -> None:
    watch = ReuseWatch()
    for prompt in range(200):
        _serve(watch, prompt)
    mixed = _keys(199)[:5] + _keys(5000)
    assert watch.worth_saving(mixed, 0.05) == 5


def test_keys_are_remembered_up_to_a_bound_the_newest_longest() -> None:
    watch = ReuseWatch(most_keys=32)
    for prompt in range(200):
        _serve(watch, prompt)
    assert watch.worth_saving(_keys(199), 0.05) == 16
    assert watch.worth_saving(_keys(198), 0.05) == 16
    assert watch.worth_saving(_keys(197), 0.05) == 0


def test_an_empty_prompt_counts_nothing() -> None:
    watch = ReuseWatch()
    watch.asked([])
    assert watch.share == 1.0
