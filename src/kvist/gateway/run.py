"""Runs a gateway as a process: on uvloop where it is installed, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from kvist.gateway.server import Gateway, serve

_Runs = Callable[[Coroutine[Any, Any, None]], None]


def run(gateway: Gateway, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serves until a signal; a second one ends it at once."""
    _raise_descriptors()
    _loop_runner()(_until_signal(gateway, listener, on_ready))


async def _until_signal(
    gateway: Gateway, listener: socket.socket, on_ready: Callable[[], None]
) -> None:
    loop = asyncio.get_running_loop()
    stop = loop.create_future()
    task = asyncio.ensure_future(serve(gateway, listener, stop, on_ready))

    def end() -> None:
        if stop.done():
            task.cancel()
        else:
            stop.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    try:
        await task
    except asyncio.CancelledError:
        if not stop.done():
            raise


def _raise_descriptors() -> None:
    """Each stream takes two descriptors: its client's and its engine's."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _loop_runner() -> _Runs:
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    runs: _Runs = uvloop.run
    return runs
