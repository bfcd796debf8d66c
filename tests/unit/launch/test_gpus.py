"""Which GPUs engines may have, and how many one takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvist.core.errors import ConfigError
from kvist.launch.gpus import gpu_ids, gpus_an_engine


def test_what_the_environment_names_comes_before_what_the_driver_shows(tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert gpu_ids({}, tmp_path) == ("0", "1")
    assert gpu_ids({"CUDA_VISIBLE_DEVICES": "3, GPU-ab"}, tmp_path) == ("3", "GPU-ab")
    assert gpu_ids({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()
    assert gpu_ids({}, tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("args", "gpus"),
    [
        ([], 1),
        (["--tensor-parallel-size", "4"], 4),
        (["--tensor_parallel_size=2", "-pp", "2"], 4),
        (["-tp", "8", "-tp=2", "--data-parallel-size", "3", "--dtype", "auto"], 6),
    ],
    ids=["none", "tp", "tp and pp", "the last counts"],
)
def test_an_engine_takes_as_many_as_its_parallel_sizes_say(args: list[str], gpus: int) -> None:
    assert gpus_an_engine(args) == gpus


@pytest.mark.parametrize("text", ["none", "0", "-1", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no number"):
        gpus_an_engine(["-tp", text])
