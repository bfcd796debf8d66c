"""The loop of every driver: lines in, JSON out; see `kvist.bench.store.driven`."""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_SAMPLED = 8


def load_blocks(settings: dict[str, Any]) -> tuple[Bytes, Bytes]:
    """The blocks, shared, and room for as many: both (count, bytes of a block)."""
    count, size = settings["count"], settings["block_bytes"]
    fd = os.open(settings["blocks"], os.O_RDWR)
    source = mmap.mmap(fd, count * size)
    os.close(fd)
    target = mmap.mmap(-1, count * size)
    room = np.frombuffer(target, np.uint8).reshape(count, size)
    room[:] = 1
    return np.frombuffer(source, np.uint8).reshape(count, size), room


def forget(target: Bytes) -> None:
    """Makes what is compared differ."""
    target[:: max(1, len(target) // _SAMPLED)] = 0


def prove(source: Bytes, target: Bytes) -> None:
    """Raises `RuntimeError` unless what was read is what was written."""
    for i in range(0, len(source), max(1, len(source) // _SAMPLED)):
        if not np.array_equal(source[i], target[i]):
            raise RuntimeError(f"other bytes for block {i}")


def obey(start: Callable[[dict[str, Any]], Any]) -> None:
    """Starts the peer and does what it is told until `quit` or the end of input.

    Libraries print: their standard output is made standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: object) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    peer = None
    try:
        peer = start(json.loads(sys.argv[1]))
        answer(took_s=None)
        for line in sys.stdin:
            word, *rest = line.split()
            if word == "quit":
                break
            answer(took_s=getattr(peer, word)(int(rest[0])))
    except Exception as error:
        kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
        answer(error=f"{kind}{error}"[:300])
        raise
    finally:
        if peer is not None:
            peer.close()
