"""Two models whose folders have the same name, or the same model in another dtype, RoPE scaling or
revision, never share a block; a moved folder still hits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvist.connectors.identity import (
    fingerprint,
    keyspace_for,
    lora_id,
    model_layout,
    multimodal_extras,
    rope_text,
    weights_id,
    windows_text,
)
from kvist.core.errors import ConfigError, UnsupportedError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "dtype": "float32",
}
SHA = "0123456789abcdef0123456789abcdef01234567"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def write_safetensors(path: Path, tensors: dict[str, bytes], dtype: str = "F32") -> None:
    header: dict[str, Any] = {}
    at = 0
    for name, data in tensors.items():
        shape = [len(data) // (4 if dtype == "F32" else 2)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


def model_folder(
    folder: Path, *, fill: bytes = b"\x01", config: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **(config or {})}))
    tensors = {f"layer.{i}.k_proj": fill * 400_000 for i in range(8)}
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def of_folder(folder: Path, *, kv_dtype: str = "float32") -> bytes:
    config = json.loads((folder / "config.json").read_text())
    return fingerprint(
        keyspace_for(
            config,
            weights=weights_id(folder),
            block_tokens=16,
            kv_dtype=kv_dtype,
            activation_dtype=kv_dtype,
        )
    )


def test_two_models_in_folders_of_one_name_never_share(tmp_path: Path) -> None:
    one = model_folder(tmp_path / "a" / "model", fill=b"\x01")
    two = model_folder(tmp_path / "b" / "model", fill=b"\x02")
    assert of_folder(one) != of_folder(two)


def test_a_moved_and_renamed_folder_still_hits(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "a" / "model")
    before = of_folder(folder)
    moved = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(folder, moved)
    shutil.rmtree(folder)
    config = json.loads((moved / "config.json").read_text())
    config |= {"_name_or_path": str(moved), "transformers_version": "9.9"}
    (moved / "config.json").write_text(json.dumps(config, indent=7))
    (moved / "model.safetensors").rename(moved / "model-00001-of-00001.safetensors")
    assert of_folder(moved) == before


def test_another_kv_or_activation_dtype_never_shares(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    assert of_folder(folder, kv_dtype="float32") != of_folder(folder, kv_dtype="bfloat16")


def test_weights_stored_in_another_dtype_have_another_id(tmp_path: Path) -> None:
    one, two = model_folder(tmp_path / "one"), model_folder(tmp_path / "two")
    tensors = {f"layer.{i}.k_proj": b"\x01" * 400_000 for i in range(8)}
    write_safetensors(two / "model.safetensors", tensors, dtype="BF16")
    assert weights_id(one) != weights_id(two)


def test_another_rope_scaling_never_shares() -> None:
    texts = {
        rope_text({**LLAMA, "rope_scaling": scaling})
        for scaling in (
            None,
            {"type": "linear", "factor": 2.0},
            {"type": "linear", "factor": 4.0},
            YARN,
            {**YARN, "factor": 8.0},
            {**YARN, "original_max_position_embeddings": 2048},
        )
    }
    assert len(texts) == 6
    assert rope_text({**LLAMA, "rope_theta": 5e5}) != rope_text(LLAMA)
    assert rope_text({**LLAMA, "partial_rotary_factor": 0.5}) != rope_text(LLAMA)
    assert rope_text({**LLAMA, "rope_scaling": YARN}) != rope_text(
        {**LLAMA, "rope_scaling": YARN, "max_position_embeddings": 8192}
    )


def test_another_revision_never_shares(tmp_path: Path) -> None:
    other = SHA[::-1]
    one = model_folder(tmp_path / "snapshots" / SHA)
    two = model_folder(tmp_path / "snapshots" / other)
    assert weights_id(one) == f"commit:{SHA}"
    assert weights_id(two) == f"commit:{other}"
    assert weights_id(tmp_path / "gone", SHA) == f"commit:{SHA}"


def test_a_branch_name_is_no_revision(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    assert weights_id(folder, "main") == weights_id(folder)
    assert weights_id(folder).startswith("digest:")


def test_a_fine_tune_of_one_tensor_has_another_id(tmp_path: Path) -> None:
    one, two = model_folder(tmp_path / "one"), model_folder(tmp_path / "two")
    tensors = {f"layer.{i}.k_proj": b"\x01" * 400_000 for i in range(8)}
    tensors["layer.5.k_proj"] = b"\x03" * 400_000
    write_safetensors(two / "model.safetensors", tensors)
    assert weights_id(one) != weights_id(two)


def test_a_setting_in_config_json_changes_the_id(tmp_path: Path) -> None:
    one = model_folder(tmp_path / "one")
    two = model_folder(tmp_path / "two", config={"rms_norm_eps": 1e-5})
    assert weights_id(one) != weights_id(two)


def test_bin_weights_are_identified_too(tmp_path: Path) -> None:
    ids = set()
    for name, fill in (("one", b"\x01"), ("two", b"\x02")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA))
        (folder / "pytorch_model.bin").write_bytes(fill * 3_000_000)
        ids.add(weights_id(folder))
    assert len(ids) == 2


def test_a_folder_without_weights_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        weights_id(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ConfigError, match="no weights"):
        weights_id(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="safetensors"):
        weights_id(tmp_path)


def test_old_and_new_rope_spellings_are_one() -> None:
    old = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}
    new = {k: v for k, v in LLAMA.items() if not k.startswith("rope")}
    new["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000}
    assert rope_text(old) == rope_text(new)
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000}
    assert rope_text(LLAMA) == rope_text(new)


def test_rope_of_each_layer_type_is_kept_apart_and_spelt_once() -> None:
    base = {k: v for k, v in LLAMA.items() if not k.startswith("rope")} | {"model_type": "gemma3"}
    linear = {"rope_type": "linear", "factor": 8.0}
    old = {**base, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": linear}
    new = {
        **base,
        "rope_parameters": {
            "full_attention": {**linear, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    assert rope_text(old) == rope_text(new)
    assert rope_text(old) != rope_text({**old, "rope_local_base_freq": 2e4})


def test_a_model_without_rope_says_null() -> None:
    assert rope_text({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8}) == "null"


def test_length_dependent_rope_is_refused_unless_the_engine_fixes_it() -> None:
    config = {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    common: dict[str, Any] = {
        "weights": "digest:00",
        "block_tokens": 16,
        "kv_dtype": "float32",
        "activation_dtype": "float32",
    }
    with pytest.raises(UnsupportedError, match="RoPE changes"):
        keyspace_for(config, **common)
    one = keyspace_for(config, **common, rope_regime="vllm:max_model_len=4096")
    two = keyspace_for(config, **common, rope_regime="vllm:max_model_len=8192")
    assert fingerprint(one) != fingerprint(two)


def test_quantisation_of_the_config_or_the_engine_is_in_the_keyspace() -> None:
    common: dict[str, Any] = {
        "weights": "digest:00",
        "block_tokens": 16,
        "kv_dtype": "float32",
        "activation_dtype": "float32",
    }
    plain = keyspace_for(LLAMA, **common)
    own = keyspace_for({**LLAMA, "quantization_config": {"bits": 4}}, **common)
    engine = keyspace_for(LLAMA, **common, quantisation={"bits": 8})
    assert len({fingerprint(k) for k in (plain, own, engine)}) == 3


def test_windows_say_null_without_sliding_layers() -> None:
    assert windows_text(LLAMA) == "null"
    assert windows_text({**LLAMA, "sliding_window": 128, "use_sliding_window": False}) == "null"


def test_windows_name_each_layer() -> None:
    assert windows_text({**LLAMA, "sliding_window": 128}) == "[128,128,128,128]"
    types = ["sliding_attention", "full_attention"] * 2
    typed = {**LLAMA, "sliding_window": 64, "layer_types": types}
    assert windows_text(typed) == "[64,null,64,null]"
    gemma2 = {**LLAMA, "sliding_window": 64, "model_type": "gemma2"}
    assert windows_text(gemma2) == "[64,null,64,null]"


def test_layout_follows_grouped_and_multi_head_attention() -> None:
    grouped = model_layout(LLAMA, 16, "bfloat16")
    assert (grouped.layers, grouped.kv_heads, grouped.head_dim) == (4, 2, 32)
    single = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert model_layout(single, 16, "bfloat16").kv_heads == 8
    assert model_layout({**LLAMA, "head_dim": 128}, 16, "bfloat16").head_dim == 128
    assert model_layout({"vision": {}, "text_config": LLAMA}, 16, "bfloat16") == grouped


def test_layout_of_latent_attention_has_one_kind() -> None:
    mla = {**LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}
    layout = model_layout(mla, 16, "bfloat16")
    assert (layout.kinds, layout.kv_heads, layout.head_dim) == (1, 1, 576)


@pytest.mark.parametrize(
    "extra",
    [
        {"layer_types": ["linear_attention", "full_attention"] * 2},
        {"model_type": "mamba2"},
        {"num_kv_shared_layers": 2},
        {"num_key_value_heads": [1, 2, 2, 2]},
        {"head_dim": 64, "global_head_dim": 128},
        {"head_dim": 192, "v_head_dim": 128},
        {"is_encoder_decoder": True},
        {"kv_lora_rank": 512, "index_topk": 2048},
    ],
)
def test_layouts_that_cannot_be_expressed_are_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=";"):
        model_layout({**LLAMA, **extra}, 16, "bfloat16")


def test_lora_id_follows_content_not_place(tmp_path: Path) -> None:
    def adapter(name: str, fill: bytes, alpha: int, base: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        config = {"lora_alpha": alpha, "base_model_name_or_path": base}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        (folder / "adapter_model.safetensors").write_bytes(fill * 100)
        return folder

    one = lora_id(adapter("one", b"\x01", 8, "/a"))
    assert one == lora_id(adapter("same", b"\x01", 8, "/b"))
    assert one != lora_id(adapter("weights", b"\x02", 8, "/a"))
    assert one != lora_id(adapter("alpha", b"\x01", 16, "/a"))
    (tmp_path / "one" / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no adapter weights"):
        lora_id(tmp_path / "one")


def test_multimodal_extras_mark_each_block_that_a_placeholder_overlaps() -> None:
    extras = multimodal_extras([("cat", 10, 30), ("dog", 41, 2)], 16)
    assert sorted(extras) == [0, 1, 2]
    assert all(len(e) == 32 for e in extras.values())
    assert len(set(extras.values())) == 3
    other = multimodal_extras([("cow", 10, 30), ("dog", 41, 2)], 16)
    assert all(extras[i] != other[i] for i in extras)


def test_multimodal_extras_depend_on_place_and_not_on_order() -> None:
    one = multimodal_extras([("cat", 1, 4), ("dog", 8, 4)], 16)
    assert one == multimodal_extras([("dog", 8, 4), ("cat", 1, 4)], 16)
    assert one != multimodal_extras([("cat", 2, 4), ("dog", 8, 4)], 16)
    assert one != multimodal_extras([("cat", 1, 5), ("dog", 8, 4)], 16)
    shifted = multimodal_extras([("cat", 17, 4), ("dog", 24, 4)], 16)
    assert one[0] == shifted[1]
    assert multimodal_extras([("cat", 1, 0)], 16) == {}
    with pytest.raises(ValueError, match="cannot stand"):
        multimodal_extras([("cat", -1, 4)], 16)
