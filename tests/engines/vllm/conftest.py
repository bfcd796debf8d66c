"""Engines for the tests of this folder: the reference, and a way to start others."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

# For `vllm_engine` and `node_process`; pytest runs with `importmode=importlib`.
for folder in (Path(__file__).parent, Path(__file__).parents[2] / "node"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

StartEngine = Callable[..., Any]
_running: list[Any] = []  # in the order of their starts


@pytest.fixture(scope="module")
def start_engine(
    smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartEngine]:
    """Starts engines on the demo model (or `model`); whatever still runs is ended."""
    from vllm_engine import VllmEngine

    with ExitStack() as stack:

        def start(*, model: Path = smollm2_folder, **arguments: Any) -> VllmEngine:
            log = tmp_path_factory.mktemp("engine") / "log"
            engine = stack.enter_context(VllmEngine(model, log, **arguments))
            _running.append(engine)
            return engine

        yield start
    _running.clear()


@pytest.fixture(autouse=True)
def _a_test_ends_what_it_started() -> Iterator[None]:
    """An engine takes 3 GB: only those of the module's own fixtures outlive a test."""
    before = len(_running)
    yield
    for engine in _running[before:]:
        engine.close()
    del _running[before:]


@pytest.fixture(scope="session")
def reference(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tokens of an engine without Kvist and without a prefix cache: asked once in a run."""
    from vllm_engine import Reference, VllmEngine, make_reference

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # of the workers' own folders
    saved = shared / "vllm_reference.json"
    with (shared / "vllm_reference.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the tests' own timeout ends a wait that is too long
        if not saved.exists():
            log = tmp_path_factory.mktemp("reference") / "log"
            with VllmEngine(smollm2_folder, log, enable_prefix_caching=False) as engine:
                make_reference(engine).save(saved)
    return Reference.load(saved)


@pytest.fixture
def small_llama(tmp_path: Path) -> Path:
    """A random Llama with four KV heads, which two ranks can share (SmolLM2 has three)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    folder = tmp_path / "llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
