"""Tables of `cachegen` for benchmarks and for `kvist codec profile`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvist.bench.codec.real_kv import default_text
from kvist.bench.smollm2 import cache_folder, ensure_smollm2
from kvist.codec.cachegen import profile
from kvist.codec.cachegen import table as table_format
from kvist.codec.cachegen.table import ProfileTable
from kvist.core.errors import ConfigError, FormatError, UnsupportedError
from kvist.native import digest

_WINDOW_TOKENS = 640
_LEAST_TOKENS = 64
_CONTEXTS = 12

Progress = Callable[[int, int], None]


def default_texts() -> str:
    """What a profile reads unless it is told otherwise."""
    return default_text()


def spread_contexts(ids: Sequence[int], contexts: int) -> list[list[int]]:
    """At most so many contexts of equal length, evenly over a text.

    Raises:
        ConfigError: the text is too short for one.
    """
    length = min(_WINDOW_TOKENS, len(ids) // contexts)
    if length < _LEAST_TOKENS:
        length, contexts = min(_WINDOW_TOKENS, len(ids)), 1
    if length < _LEAST_TOKENS:
        raise ConfigError(f"a text of {len(ids)} tokens is too short", path="--texts")
    starts = [i * (len(ids) - length) // max(1, contexts - 1) for i in range(contexts)]
    return [list(ids[start : start + length]) for start in starts]


def profile_folder(
    folder: Path, text: str, *, contexts: int, progress: Progress | None = None
) -> ProfileTable:
    """The table of the model in a folder, after it read `text`.

    Raises:
        ConfigError: the model cannot be loaded, or the text is too short.
        UnsupportedError: the model keeps another kind of cache.
    """
    model, tokenizer = load_model(folder)
    from kvist.connectors.transformers.kv_profile import profile_model

    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return profile_model(model, spread_contexts(ids, contexts), progress)


def load_model(folder: Path, dtype: str = "auto") -> tuple[Any, Any]:
    """A model and its tokenizer.

    Raises:
        ConfigError: it cannot be loaded.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype).eval()
        return model, AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as exc:
        raise UnsupportedError(f"cannot load {folder}: {exc}") from exc


def demo_table(text: str, progress: Progress | None = None) -> ProfileTable:
    """The demo model's table after it read `text`; kept beside the model until profiling changes.

    Raises:
        ConfigError: the `demo` extra is missing, or the text is too short.
    """
    made_by = Path(profile.__file__).read_bytes() + Path(table_format.__file__).read_bytes()
    name = digest(made_by + f"{text}\0{_CONTEXTS}".encode()).hex()[:16]
    path = cache_folder() / f"smollm2-135m-{name}.kvcg"
    if path.is_file():
        with suppress(OSError, FormatError):  # gone meanwhile, or damaged: made anew
            return ProfileTable.parse(path.read_bytes())
    table = profile_folder(ensure_smollm2("float32"), text, contexts=_CONTEXTS, progress=progress)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(table.file_bytes)
    unfinished.replace(path)
    return table
