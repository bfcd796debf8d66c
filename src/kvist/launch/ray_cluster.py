"""What `kvist up` and `kvist down` do to a Ray cluster."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import msgspec

from kvist.core.errors import ConfigError
from kvist.launch.spec import ClusterSpec

if TYPE_CHECKING:
    from kvist.launch.ray_actors import ClusterState

_ANSWER_S = 30.0
_GONE_S = 15.0
_PAUSE_S = 0.5


@contextmanager
def connected(address: str, name: str) -> Iterator[None]:
    """While the body runs, this process is a driver of the Ray cluster at `address`.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "is not installed", path="ray", remedy="pip install 'kvist[ray]'"
        ) from None
    from kvist.launch.ray_actors import namespace_of

    try:
        ray.init(
            address=address,
            namespace=namespace_of(name),
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster at {address!r}: {' '.join(str(error).split())[:120]}",
            path="$.ray",
            remedy="start one with `ray start --head`, or give its address",
        ) from error
    with redirect_stdout(sys.stderr):  # Ray prints what happens to its nodes
        try:
            yield
        finally:
            ray.shutdown()


def up(spec: ClusterSpec) -> None:
    """Has a supervisor start the cluster; returns at once. Does nothing where it runs already.

    Raises:
        ConfigError: a cluster of this name runs with another description.
    """
    import ray

    from kvist.launch import ray_actors

    handle = (
        ray.remote(ray_actors.Supervisor)
        .options(
            name=ray_actors.SUPERVISOR,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=2,
            num_cpus=0,
        )
        .remote(msgspec.json.encode(spec))
    )
    found = _state(handle)
    if found.spec != spec:
        raise ConfigError(
            f"cluster {spec.name} runs with another description",
            path="$.name",
            remedy=f"end it first (kvist down --name {spec.name}), or choose another name",
        )


def state() -> ClusterState | None:
    """What runs in this namespace; `None` where nothing does."""
    handle = _supervisor()
    return None if handle is None else _state(handle)


def down() -> bool:
    """Ends everything of this namespace; returns whether there was something.

    Raises:
        ConfigError: Ray still names actors afterwards.
    """
    import ray

    from kvist.launch import ray_actors

    handle, names = _supervisor(), frozenset(ray.util.list_named_actors())
    if handle is not None:
        stopped = handle.stop.remote()
        ray.wait([stopped], timeout=ray_actors.STOP_S + _ANSWER_S)
        ray.kill(handle)
    ray_actors.stop_keepers(ray_actors.find_keepers())  # of a supervisor that was lost
    if not ray_actors.wait_gone(names, _GONE_S):
        raise ConfigError("Ray still has actors of this cluster", path="ray", remedy="see ray list")
    return bool(names)


def _supervisor() -> Any:
    import ray

    from kvist.launch.ray_actors import SUPERVISOR

    try:
        return ray.get_actor(SUPERVISOR)
    except ValueError:
        return None


def _state(handle: Any) -> ClusterState:
    """What the supervisor says; waits while Ray is moving it from a host that was lost.

    Raises:
        ConfigError: it does not answer.
    """
    import ray
    from ray.exceptions import RayError

    from kvist.launch.ray_actors import ClusterState

    until, pause = time.monotonic() + _ANSWER_S, threading.Event()
    while True:
        try:
            raw = ray.get(handle.state.remote(), timeout=_ANSWER_S)
        except RayError as error:
            if time.monotonic() > until:
                raise ConfigError(
                    f"the supervisor does not answer: {type(error).__name__}",
                    path="ray",
                    remedy="see `ray status`, or kvist down",
                ) from error
            pause.wait(_PAUSE_S)
            continue
        return msgspec.json.decode(raw, type=ClusterState)
