"""Huge pages behind the engine's KV cache: in the background, contents unchanged."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvist.connectors.vllm import page_care  # noqa: E402

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


def test_every_layer_is_asked_for_once_from_its_start_within_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [torch.zeros(20 * MIB, dtype=torch.uint8) for _ in range(2)]
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(page_care, "_MOST_BYTES", 32 * MIB)
    monkeypatch.setattr(page_care, "collapse", lambda at, size: asked.append((at, size)))
    monkeypatch.setattr(page_care, "HUGE_BYTES", 2 * MIB)
    thread = page_care.care_for(layers)
    assert thread is not None
    thread.join(WAIT_S)
    starts = [layer.data_ptr() for layer in layers]
    first_round, second_round = asked[:2], asked[2:]
    assert [at for at, _ in first_round] == starts
    assert [at - 8 * MIB for at, _ in second_round] == starts
    assert {size for _, size in asked} == {8 * MIB}


def test_without_huge_pages_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_care, "HUGE_BYTES", 0)
    assert page_care.care_for([torch.zeros(8)]) is None
