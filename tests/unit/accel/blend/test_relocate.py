"""Keys turn by the difference of their positions, from the stored copy, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvist.accel.blend.relocate import Rope, RopeStyle, relocate

FREQUENCIES = (1.0, 0.25, 0.01)
TOKENS, HEAD_DIM = 5, 8


def _keys() -> Any:
    return torch.randn(2, TOKENS, HEAD_DIM, generator=torch.Generator().manual_seed(2))


def _pairs(style: RopeStyle) -> list[tuple[int, int]]:
    return [(i, i + 3) if style is RopeStyle.HALVES else (2 * i, 2 * i + 1) for i in range(3)]


@pytest.mark.parametrize("style", list(RopeStyle))
def test_each_pair_turns_by_its_own_frequency_and_the_rest_stays(style: RopeStyle) -> None:
    keys, places = _keys(), torch.arange(TOKENS)
    there = torch.tensor([4000, 7, 2, 3, 100])
    moved = relocate(keys, places, there, Rope(FREQUENCIES, style))
    for (a, b), frequency in zip(_pairs(style), FREQUENCIES, strict=True):
        angle = (there - places).double() * frequency
        turned = torch.complex(keys[..., a].double(), keys[..., b].double()) * torch.polar(
            torch.ones_like(angle), angle
        )
        torch.testing.assert_close(moved[..., a], turned.real.float(), rtol=0, atol=1e-3)
        torch.testing.assert_close(moved[..., b], turned.imag.float(), rtol=0, atol=1e-3)
    assert torch.equal(moved[..., 6:], keys[..., 6:])


def test_the_stored_copy_is_not_changed_and_its_dtype_is_kept() -> None:
    stored = _keys().to(torch.bfloat16)
    before = stored.clone()
    moved = relocate(stored, torch.arange(TOKENS), torch.arange(TOKENS) + 9, Rope(FREQUENCIES))
    assert torch.equal(stored, before)
    assert moved.dtype == torch.bfloat16
    assert not torch.equal(moved, stored)


def test_keys_that_stay_where_they_are_stay_bit_for_bit() -> None:
    stored, places = _keys().to(torch.bfloat16), torch.arange(TOKENS) + 4000
    assert torch.equal(relocate(stored, places, places, Rope(FREQUENCIES)), stored)


def test_a_layer_without_rope_needs_nothing() -> None:
    keys = _keys()
    assert relocate(keys, torch.arange(TOKENS), torch.arange(TOKENS) + 9, None) is keys


def test_float32_rounding_of_the_angles_is_moved_as_well() -> None:
    """A model rounds position × frequency to float32, 1e-4 rad at 4,000 tokens; so do we."""
    frequency = 0.7123456
    rope = Rope((frequency,))
    far = torch.tensor([4001])
    want = far.float() * torch.tensor(frequency)  # as rounded by the model
    key = torch.tensor([[1.0, 0.0]])
    moved = relocate(key, torch.tensor([0]), far, rope)
    torch.testing.assert_close(moved[0], torch.stack((want.cos(), want.sin()))[:, 0], rtol=0,
                               atol=1e-6)  # fmt: skip
