"""How long a model's first pass takes inside `generate`: the prefill."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvist.core.errors import KvistError
from kvist.cost.device import DEVICES, Hardware, device
from kvist.cost.model import shape_from_config
from kvist.cost.prefill import PrefillCoefficients
from kvist.cost.seed import prefill_seed


@dataclass(slots=True)
class PassTime:
    """Seconds of the first pass; 0 until it is over."""

    seconds: float = 0.0
    began_s: float = 0.0


@contextmanager
def first_pass(model: Any) -> Iterator[PassTime]:
    """Times the first call of `model` in the body."""
    found = PassTime()

    def before(*_: Any) -> None:
        if not found.began_s:
            found.began_s = time.perf_counter()

    def after(*_: Any) -> None:
        if not found.seconds:
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)  # the next token waits for it anyway
            found.seconds = time.perf_counter() - found.began_s

    hooks = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def seed_of(model: Any) -> PrefillCoefficients:
    """A first guess of prefill times, which the first passes correct."""
    return prefill_seed(shape_from_config(model.config), _hardware(model.device))


def _hardware(place: Any) -> Hardware:
    if place.type == "cpu":
        return Hardware(DEVICES["cpu"], torch.get_num_threads())
    try:
        return Hardware(device(torch.cuda.get_device_name(place)))
    except KvistError:
        return Hardware(DEVICES["a100"])
