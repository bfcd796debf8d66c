"""A profile of a Transformers model: its keys are turned back, and its table codes its KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvist.codec.cachegen.codec import Cachegen
from kvist.codec.cachegen.levels import level_named
from kvist.codec.cachegen.table import TableShape, read_table
from kvist.core.errors import ConfigError, UnsupportedError
from kvist.core.layout import BlockLayout
from kvist.native.cachegen_twin import from_float

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvist.cli.main import main  # noqa: E402
from kvist.connectors.transformers.kv_profile import (  # noqa: E402
    frequencies_of,
    profile_model,
)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LAYOUT = BlockLayout(layers=2, kv_heads=2, head_dim=16, block_tokens=32, dtype="bfloat16")


def tiny(**settings: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        **settings,
    )
    return transformers.LlamaForCausalLM(config).float().eval()


def texts(count: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 97, length).tolist() for _ in range(count)]


def test_a_models_frequencies_are_found_and_used() -> None:
    model = tiny()
    want = 10_000.0 ** (-np.arange(0, 16, 2) / 16)
    assert np.allclose(frequencies_of(model), want, rtol=1e-6)
    done: list[tuple[int, int]] = []
    table = profile_model(model, texts(3, 160), lambda i, of: done.append((i, of)))
    assert done == [(0, 3), (1, 3), (2, 3)]
    assert table.shape == TableShape.of(LAYOUT)
    assert np.allclose(table.inv_freq, want, rtol=1e-6)


def test_a_table_codes_its_models_kv_small_and_near() -> None:
    model = tiny()
    table = profile_model(model, texts(4, 160))
    with torch.no_grad():
        cache = model(torch.tensor(texts(5, 160)[4:])).past_key_values
    kv = torch.stack([torch.stack((la.keys[0], la.values[0])) for la in cache.layers]).numpy()
    block = kv[:, :, :, 64:96]
    raw = from_float(np.ascontiguousarray(block), "bfloat16").tobytes()
    sizes, errors = [], []
    for rank in (1, 4, 7):
        codec = Cachegen(table, level_named(f"cachegen-{rank}"), LAYOUT)
        stored, out = codec.encode(memoryview(raw)), bytearray(len(raw))
        codec.decode(memoryview(stored), memoryview(out))
        sizes.append(len(stored))
        back = (np.frombuffer(out, np.uint16).astype(np.uint32) << 16).view(np.float32)
        errors.append(float(np.abs(back.reshape(block.shape) - block).mean()))
    assert len(raw) > sizes[0] > sizes[1] > sizes[2]
    assert errors[0] < errors[1] < errors[2]


def test_texts_that_are_too_short_and_other_caches_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 64 tokens"):
        profile_model(tiny(), texts(1, 40))
    with pytest.raises(ConfigError, match="at least 64 tokens"):
        profile_model(tiny(), [])
    sliding = transformers.MistralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=8,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="one K and V per layer"):
        profile_model(transformers.MistralForCausalLM(sliding), texts(1, 80))


def test_the_command_writes_a_table_that_can_be_read(
    tmp_path: Path, smollm2_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("The harbour master counts the boats each evening, and writes them down. " * 40)
    out = tmp_path / "model.kvcg"
    args = ["codec", "profile", str(smollm2_folder), "--texts", str(text), "--out", str(out)]
    assert main([*args, "--contexts", "2"]) == 0
    table = read_table(out)
    assert table.shape == TableShape(30, 2, 3, 64)
    assert len(table.inv_freq) == 32
    assert table.id.hex() in capsys.readouterr().out
    assert list(tmp_path.glob(".model*")) == []


@pytest.mark.parametrize(
    ("args", "want"),
    [
        (["nowhere"], "is not the folder of a model"),
        (["smollm2-135m", "--contexts", "0"], "needs a context"),
        (["nowhere", "--texts", "nothing"], "No such file"),
    ],
)
def test_what_cannot_be_profiled_is_said_in_one_line(
    args: list[str], want: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["codec", "profile", *args]) == 2
    error = capsys.readouterr().err
    assert want in error
    assert error.count("\n") == 1
