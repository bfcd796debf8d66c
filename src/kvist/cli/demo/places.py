"""Where the demo keeps its files, and the configuration that it runs with."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from kvist.bench.smollm2 import cache_folder
from kvist.cli.serve_checks import check_free
from kvist.config import LoadedConfig, load_config

BLOCK_TOKENS = 128
_CAPACITY = "1GiB"  # the document's KV takes 200 MB


@dataclass(frozen=True, slots=True)
class Places:
    """The demo's folders and configuration, which no file or variable of the user's changes."""

    folder: Path
    ssd: Path
    loaded: LoadedConfig

    def log(self, number: int) -> Path:
        """Output of the server's start `number`."""
        return self.folder / f"vllm-{number}.log"


def fresh_places() -> Places:
    """The demo's folder with an empty SSD cache.

    Raises:
        ConfigError: another demo, or the server that it kept, uses it.
    """
    folder = cache_folder().parent / "demo"
    ssd = folder / "ssd"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_free(ssd, "the demo's own")
    shutil.rmtree(ssd)
    loaded = load_config(
        os.devnull,
        env={},
        overrides={
            "block_tokens": BLOCK_TOKENS,
            "store.dram.capacity": _CAPACITY,
            "store.ssd.path": str(ssd),
            "store.ssd.capacity": _CAPACITY,
        },
        overrides_origin="kvist demo",
    )
    return Places(folder, ssd, loaded)
