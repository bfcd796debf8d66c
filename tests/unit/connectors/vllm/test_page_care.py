"""Huge pages behind the engine's KV cache: in the background, contents unchanged."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvist.connectors.vllm import page_care  # noqa: E402
from kvist.tiers.warmer import GiveWay  # noqa: E402

WAIT_S = 60.0
MIB = 1 << 20


def test_contents_stay_while_pages_move() -> None:
    layers = [torch.full((6, MIB), i + 1, dtype=torch.uint8) for i in range(3)]
    thread = page_care.care_for(layers)
    if thread is None:
        pytest.skip("no huge pages here")
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert all(bool((layer == i + 1).all()) for i, layer in enumerate(layers))


def test_huge_pages_of_every_layer_are_asked_for_in_turn_once_and_within_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [torch.zeros(24 * MIB, dtype=torch.uint8) for _ in range(2)]
    asked: list[int] = []
    monkeypatch.setattr(page_care, "_MOST_BYTES", 40 * MIB)
    monkeypatch.setattr(page_care, "collapse", lambda at, size: asked.append(at))
    monkeypatch.setattr(page_care, "HUGE_BYTES", 2 * MIB)
    thread = page_care.care_for(layers)
    assert thread is not None
    thread.join(WAIT_S)
    firsts = [-(-layer.data_ptr() // (2 * MIB)) * 2 * MIB for layer in layers]
    each = range(0, 8 * MIB, 2 * MIB)
    assert asked[:8] == [first + at for first in firsts for at in each]
    assert len(asked) == len(set(asked)) in range(18, 21)  # of 20 MiB; one huge page may be cut
    for at in asked:
        layer = layers[at >= firsts[1]] if firsts[0] < firsts[1] else layers[at < firsts[0]]
        assert layer.data_ptr() <= at <= layer.data_ptr() + 18 * MIB


def test_the_engine_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    asked: list[int] = []

    class Watched(GiveWay):
        def let_through(self) -> None:
            waits.append(len(asked))

    monkeypatch.setattr(page_care, "collapse", lambda at, size: asked.append(at))
    monkeypatch.setattr(page_care, "HUGE_BYTES", 2 * MIB)
    thread = page_care.care_for([torch.zeros(24 * MIB, dtype=torch.uint8)], None, Watched())
    assert thread is not None
    thread.join(WAIT_S)
    assert waits == list(range(len(asked)))  # before every page
    assert asked


def test_without_huge_pages_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_care, "HUGE_BYTES", 0)
    assert page_care.care_for([torch.zeros(8)]) is None
