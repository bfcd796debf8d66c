"""A cached span that is moved gives the logits of the same span computed where it now stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import MODELS, REFUSED, tiny
from transformers import DynamicCache

from kvist.accel.blend import proof
from kvist.accel.blend.proof import prove, prove_relocation
from kvist.accel.blend.relocate import Rope, RopeStyle, relocate
from kvist.accel.blend.transformers_model import TransformersBlendModel
from kvist.core.errors import UnsupportedError

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

VOCABULARY = 199
SPAN, AFTER = 24, 8
SHIFTS = (1, 63, 1000, 4000)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """On a busy machine, threads that wait for each other are far slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def moved_logits(model: Any, tokens: Any, shift: int) -> Any:
    """Logits of the last tokens, after the first were computed at 0 and moved by `shift`."""
    adapter = TransformersBlendModel(model)
    keys, values, _ = adapter.own_pass(tokens[:SPAN])
    here = torch.arange(SPAN)
    cache = DynamicCache(config=model.config)
    for layer in range(adapter.shape.layers):
        placed = relocate(keys[layer], here, here + shift, adapter.rope(layer))
        cache.update(placed[None], values[layer][None], layer)
    return _logits(model, tokens[SPAN:], shift + SPAN, cache)


def fresh_logits(model: Any, tokens: Any, shift: int) -> Any:
    """Logits of the last tokens, all computed at `shift` and after."""
    return _logits(model, tokens, shift, DynamicCache(config=model.config))[SPAN:]


def _logits(model: Any, tokens: Any, first: int, cache: Any) -> Any:
    places = torch.arange(first, first + len(tokens))[None]
    with torch.no_grad():
        out = model(tokens[None], position_ids=places, past_key_values=cache)
    return out.logits[0].float()


def apart(found: Any, want: Any) -> float:
    """Largest error over the spread of the logits."""
    return float((found - want).abs().max() / want.std())


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_after_a_shift_equal_a_fresh_computation(name: str, shift: int) -> None:
    tokens = torch.randint(
        3, VOCABULARY, (SPAN + AFTER,), generator=torch.Generator().manual_seed(11)
    )
    model = tiny(name)
    want = fresh_logits(model, tokens, shift)
    assert apart(moved_logits(model, tokens, shift), want) < 2e-3
    half = tiny(name, torch.bfloat16)
    found = moved_logits(half, tokens, shift)
    # Within what bfloat16 itself costs here, computed afresh.
    rounding = apart(fresh_logits(half, tokens, shift), want)
    assert apart(found, want) < 2 * rounding + 0.02


@pytest.mark.parametrize("shift", [1, 500, 4000])
def test_smollm2_logits_after_a_shift_equal_a_fresh_computation(
    smollm2: Any, tokenizer: Any, shift: int
) -> None:
    text = "The lighthouse keeper rowed to the mainland twice a month for oil and letters. "
    tokens = torch.tensor(tokenizer.encode(text * 3)[: SPAN + AFTER])
    want = fresh_logits(smollm2, tokens, shift)
    assert apart(moved_logits(smollm2, tokens, shift), want) < 1e-2


def test_keys_that_are_not_moved_do_change_the_logits() -> None:
    """The tests above can fail: a span left at its stored position is no fresh computation."""
    tokens = torch.randint(3, VOCABULARY, (SPAN + AFTER,))
    model = tiny("default")
    adapter = TransformersBlendModel(model)
    keys, values, _ = adapter.own_pass(tokens[:SPAN])
    cache = DynamicCache(config=model.config)
    for layer in range(adapter.shape.layers):
        cache.update(keys[layer][None], values[layer][None], layer)
    found = _logits(model, tokens[SPAN:], 1000 + SPAN, cache)
    assert apart(found, fresh_logits(model, tokens, 1000)) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_known_families_pass_the_proof(name: str, dtype: Any) -> None:
    prove(TransformersBlendModel(tiny(name, dtype)), VOCABULARY)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="blend"):
        TransformersBlendModel(tiny(name))


@pytest.mark.parametrize("name", ["default", "llama3", "yarn", "partial", "partial-pairs"])
def test_wrong_frequencies_or_pairs_fail_the_proof(name: str) -> None:
    adapter = TransformersBlendModel(tiny(name))
    right = adapter.rope(0)
    assert right is not None
    other = RopeStyle.PAIRS if right.style is RopeStyle.HALVES else RopeStyle.HALVES
    plain = tuple(10000.0 ** (-i / len(right.inverse_frequencies)) / 2
                  for i in range(len(right.inverse_frequencies)))  # fmt: skip
    tokens = torch.arange(3, 27)
    prove_relocation(adapter, tokens)
    for wrong in (Rope(plain, right.style), Rope(right.inverse_frequencies, other)):
        adapter._rope = wrong
        with pytest.raises(UnsupportedError, match="moved by"):
            prove_relocation(adapter, tokens)


def test_a_model_that_does_more_in_a_layer_fails_the_proof() -> None:
    """Its layers look like the family's, but something was put around the MLP."""
    model = tiny("default")
    mlp = model.model.layers[3]
    plain = type(mlp).forward
    mlp.forward = lambda *args, **more: 1.01 * plain(mlp, *args, **more)
    with pytest.raises(UnsupportedError, match="whole pass"):
        prove(TransformersBlendModel(model), VOCABULARY)


def test_frequencies_that_a_cast_rounded_and_the_model_does_not_keep_fail_the_proof() -> None:
    """`model.to(bfloat16)` rounds the frequencies of one length only: keys of the other differ."""
    model = tiny("longrope-steady").to(torch.bfloat16)
    with pytest.raises(UnsupportedError, match="moved by 4000"):
        prove(TransformersBlendModel(model), VOCABULARY)


def test_hooks_on_a_layer_are_refused() -> None:
    model = tiny("default")
    model.model.layers[2].register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="hooks"):
        TransformersBlendModel(model)


def test_the_proof_does_not_pass_what_is_not_a_number() -> None:
    model = tiny("default")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(UnsupportedError, match="nan"):
        prove(TransformersBlendModel(model), VOCABULARY)
    assert proof._LEAST_ERROR < 1
