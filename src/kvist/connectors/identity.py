"""Identity of a Hugging Face model: from its files and settings to a keyspace.

A wrong hit is the worst bug that Kvist can have, so whatever cannot be told apart is refused, and
what two spellings say in common is brought to one spelling. Paths and names never enter.

Weights are named by their hub commit where it is known, else by a digest over `config.json`
(without names and versions) and, for each weights file, its size, its header, windows spaced
evenly over the file and, in a safetensors file, windows at the start and middle of every tensor:
a fine-tune that moves one matrix moves the digest, and a 70 B model takes seconds, not minutes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from kvist.connectors.model_settings import (
    length_dependent,
    model_layout,
    rope_text,
    to_json,
    windows_text,
)
from kvist.core.errors import ConfigError, UnsupportedError
from kvist.core.keyspace import Keyspace
from kvist.core.model_config import settings
from kvist.native import digest

__all__ = [
    "fingerprint",
    "keyspace_for",
    "lora_id",
    "model_layout",
    "multimodal_extras",
    "rope_text",
    "weights_id",
    "windows_text",
]

_NAMES = frozenset(
    [
        "_name_or_path",
        "_model_name_or_path",
        "name_or_path",
        "model_name",
        "name",
        "transformers_version",
        "_commit_hash",
    ]
)
_LORA_NAMES = _NAMES | {"base_model_name_or_path", "revision", "peft_version", "inference_mode"}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WINDOW_BYTES = 64 * 1024
_WINDOWS = 16
_TENSOR_WINDOW_BYTES = 4 * 1024
_MAX_HEADER_BYTES = 256 * 1024 * 1024
_MAX_LORA_FILE_BYTES = 8 * 1024**3


def weights_id(model_folder: Path | str, revision: str | None = None) -> str:
    """`commit:<sha>` where the hub commit is known, else `digest:<hex>` of the folder's content.

    Args:
        model_folder: a folder in the Hugging Face format.
        revision: the hub commit, if the caller knows it; ignored unless it is 40 hex digits
            (a branch name such as `main` names no content).

    Raises:
        ConfigError: there is no folder, no readable `config.json`, or no weights in it.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return f"commit:{revision}"
    folder = Path(model_folder)
    if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name):
        return f"commit:{folder.name}"
    config = _read_json(folder / "config.json")
    commit = config.get("_commit_hash")
    if isinstance(commit, str) and _COMMIT.fullmatch(commit):
        return f"commit:{commit}"
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ConfigError(
            "no weights (*.safetensors or pytorch_model*.bin) in the folder", path=str(folder)
        )
    parts = [digest(_canonical(_without(config, _NAMES)))]
    parts += sorted(_sampled(file) for file in files)
    return f"digest:{digest(b''.join(parts)).hex()}"


def lora_id(adapter_folder: Path | str) -> str:
    """`lora:<hex>`: digest of an adapter's settings and of its whole weights.

    Raises:
        ConfigError: there is no `adapter_config.json` or no adapter weights.
    """
    folder = Path(adapter_folder)
    config = _read_json(folder / "adapter_config.json")
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        file = folder / name
        if file.is_file():
            if file.stat().st_size > _MAX_LORA_FILE_BYTES:
                raise ConfigError("adapter weights above 8 GiB", path=str(file))
            whole = digest(file.read_bytes())
            settings_digest = digest(_canonical(_without(config, _LORA_NAMES)))
            return f"lora:{digest(settings_digest + whole).hex()}"
    raise ConfigError("no adapter weights in the folder", path=str(folder))


def keyspace_for(
    config: object,
    *,
    weights: str,
    block_tokens: int,
    kv_dtype: str,
    activation_dtype: str,
    quantisation: Mapping[str, object] | None = None,
    rope_regime: str | None = None,
) -> Keyspace:
    """The keyspace of a model as an engine runs it.

    Args:
        config: a Hugging Face config object, or the dict of a `config.json`.
        weights: from `weights_id`.
        block_tokens: tokens in a block.
        kv_dtype: dtype in which K and V are stored (a name in `core.layout.DTYPE_BYTES`).
        activation_dtype: dtype in which the model computes.
        quantisation: settings of a quantisation done while loading, KV scales included; `None`
            takes what the config says of itself.
        rope_regime: names how the engine fixes a RoPE that otherwise changes with the length of
            the whole sequence (`dynamic`, `longrope`), for instance `vllm:max_model_len=131072`.

    Raises:
        UnsupportedError: the layout cannot be expressed, or the RoPE changes with the length of
            the sequence and no regime was given: equal prefixes would not mean equal KV.
    """
    found = settings(config)
    regime = None
    if length_dependent(found):
        if rope_regime is None:
            raise UnsupportedError(
                "this model's RoPE changes with the length of the whole sequence, so the KV of "
                "a prefix is not always the same",
                remedy="use an engine that fixes it, or a model without dynamic/longrope scaling",
            )
        regime = rope_regime
    quant = found.get("quantization_config") if quantisation is None else quantisation
    rope = rope_text(config)
    return Keyspace(
        weights=weights,
        layout=model_layout(config, block_tokens, kv_dtype),
        rope=rope if regime is None else to_json({"regime": regime, "rope": json.loads(rope)}),
        windows=windows_text(config),
        quantisation=to_json(quant),
        activation_dtype=activation_dtype,
    )


def fingerprint(keyspace: Keyspace) -> bytes:
    """The keyspace's 32-byte digest."""
    return digest(keyspace.canonical_bytes())


def multimodal_extras(
    features: Sequence[tuple[str, int, int]], block_tokens: int
) -> dict[int, bytes]:
    """For each block that overlaps a placeholder, the digest of what stands there.

    Args:
        features: `(identifier, offset_tokens, length_tokens)` of each placeholder; the identifier
            is a hash of the content.
        block_tokens: tokens in a block.

    Returns:
        Block index → 32 bytes over every overlapping feature's identifier, its start relative to
        the block (negative where it began earlier) and its length.

    Raises:
        ValueError: a negative offset or length.
    """
    found: dict[int, list[tuple[int, int, bytes]]] = {}
    for identifier, offset, length in features:
        if offset < 0 or length < 0:
            raise ValueError(f"a placeholder cannot stand at {offset} with {length} tokens")
        if length == 0:
            continue
        name = identifier.encode()
        for block in range(offset // block_tokens, (offset + length - 1) // block_tokens + 1):
            found.setdefault(block, []).append((offset - block * block_tokens, length, name))
    extras: dict[int, bytes] = {}
    for block, parts in found.items():
        text = b"".join(
            start.to_bytes(8, "little", signed=True)
            + length.to_bytes(8, "little")
            + len(name).to_bytes(4, "little")
            + name
            for start, length, name in sorted(parts)
        )
        extras[block] = digest(text)
    return extras


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot be read: {e}", path=str(path)) from e
    if not isinstance(value, dict):
        raise ConfigError("is not a JSON object", path=str(path))
    return value


def _without(value: object, names: frozenset[str]) -> object:
    """`value` without those fields, at any depth (multimodal configs nest others)."""
    if isinstance(value, Mapping):
        return {k: _without(v, names) for k, v in value.items() if k not in names}
    if isinstance(value, list):
        return [_without(v, names) for v in value]
    return value


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _sampled(path: Path) -> bytes:
    """Digest of a weights file's size, header and sampled windows; never of its name."""
    size = path.stat().st_size
    parts = [size.to_bytes(8, "little")]
    with path.open("rb") as file:
        header = _header(file, size, path) if path.suffix == ".safetensors" else b""
        parts.append(digest(header))
        for start, length in _windows(size, header):
            file.seek(start)
            parts.append(digest(file.read(length)))
    return digest(b"".join(parts))


def _header(file: BinaryIO, size: int, path: Path) -> bytes:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise ConfigError("is not a whole safetensors file", path=str(path))
    return file.read(length)


def _windows(size: int, header: bytes) -> Iterator[tuple[int, int]]:
    if size <= _WINDOWS * _WINDOW_BYTES:
        yield 0, size
        return
    span = size - _WINDOW_BYTES
    for i in range(_WINDOWS):
        yield span * i // (_WINDOWS - 1), _WINDOW_BYTES
    if not header:
        return
    try:
        tensors: Mapping[str, Any] = json.loads(header)
        offsets = sorted(t["data_offsets"] for n, t in tensors.items() if n != "__metadata__")
        starts = [(8 + len(header) + int(begin), int(end) - int(begin)) for begin, end in offsets]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(f"safetensors header that cannot be read: {e}") from e
    for begin, length in starts:
        yield begin, min(length, _TENSOR_WINDOW_BYTES)
        yield begin + length // 2, min(length - length // 2, _TENSOR_WINDOW_BYTES)
