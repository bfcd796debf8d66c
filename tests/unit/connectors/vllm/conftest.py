"""These tests need vLLM's classes, but no engine; without vLLM they are not collected."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path

if (folder := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, folder)  # for `vllm_fakes`; pytest runs with `importmode=importlib`

blend = str(Path(__file__).parents[2] / "accel" / "blend")
if blend not in sys.path:
    sys.path.insert(0, blend)  # for `tiny_decoder`

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports warn; our own code must not
        import vllm.distributed.kv_transfer.kv_connector.v1.base  # noqa: F401
