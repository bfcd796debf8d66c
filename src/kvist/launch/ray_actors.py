"""The actors of a cluster on Ray: a keeper on each host, and the supervisor that places them.

A keeper runs `kvist.launch.host` and holds its stdin: when the keeper, its Ray node or all of Ray
ends, that process ends what it started. The supervisor compares the Ray nodes that are alive with
the keepers there are, and makes up the difference. Both are detached, and Ray starts them again.
Only bytes of JSON cross between them.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec
import ray
from msgspec import Struct
from ray.exceptions import RayError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvist.launch.pauses import Pauses
from kvist.launch.spec import ClusterSpec, HostOrders, HostReport, is_secret

_log = logging.getLogger(__name__)
SUPERVISOR = "supervisor"
_KEEPER = "keeper-"
_SHORT_ID = 12
_TICK_S = 0.5
_ANSWER_S = 5.0
STOP_S = 180.0  # engines, then a node that writes what it holds


class ClusterState(Struct, frozen=True):
    """What the supervisor knows."""

    spec: ClusterSpec
    hosts: tuple[HostReport, ...]
    wanted: int
    """Hosts that should run; of `all`, those that are there."""

    @property
    def ready(self) -> bool:
        """Whether every host that is wanted serves."""
        return len(self.hosts) >= max(1, self.wanted) and all(host.ready for host in self.hosts)


def namespace_of(name: str) -> str:
    """The Ray namespace of a cluster's actors."""
    return f"kvist-{name}"


class Keeper:
    """Keeps the host process of one Ray node running."""

    def __init__(self, orders: bytes) -> None:
        decoded = msgspec.json.decode(orders, type=HostOrders)
        gpu_ids = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        self._orders = msgspec.json.encode(msgspec.structs.replace(decoded, gpu_ids=gpu_ids))
        self._report = HostReport(decoded.node, "", "")
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._pauses = Pauses()
        self._process = self._start()
        threading.Thread(target=self._follow, name="kvist-host", daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._started_s = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "kvist.launch.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        try:
            process.stdin.write(self._orders + b"\n")
            process.stdin.flush()
        except OSError as error:  # it ended, or closed its stdin: it then counts as one that ended
            _log.warning("the host process took no orders: %s", error)
            process.kill()
        return process

    def _follow(self) -> None:
        while True:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                self._report = msgspec.json.decode(line, type=HostReport)
            # It closed its output, so it ends; if it does not, its children will by their ties.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            lived_s = time.monotonic() - self._started_s
            self._ended.wait(self._pauses.after(lived_s))
            with self._lock:  # one that `stop` would not know of must not begin
                if self._ended.is_set():
                    self._process.stdout.close()
                    return
                ended = self._process
                ended.kill()
                _log.warning("the host process ended and is started again")
                try:
                    self._process = self._start()
                    _close(ended)
                except OSError as error:  # none was made: the one that ended stands for it
                    _log.warning("the host process cannot be started: %s", error)

    def report(self) -> bytes:
        """The last `HostReport`, JSON."""
        return msgspec.json.encode(self._report)

    def stop(self) -> None:
        """Ends everything on this host, and returns when it has ended."""
        with self._lock:
            self._ended.set()
            process = self._process
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it took no orders: they are written once more
            process.stdin.close()
        process.wait(STOP_S)


def _close(process: subprocess.Popen[bytes]) -> None:
    """Closes our ends of the pipes of a process that ended."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # orders that it did not take are written once more
                stream.close()


class Supervisor:
    """One cluster."""

    def __init__(self, spec: bytes) -> None:
        self._spec = msgspec.json.decode(spec, type=ClusterSpec)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._keepers: dict[str, Any] = self._adopted()  # by Ray node id
        self._state = ClusterState(self._spec, (), 0)
        self._thread = threading.Thread(target=self._run, name="kvist-supervisor", daemon=True)
        self._thread.start()

    def _adopted(self) -> dict[str, Any]:
        """The keepers that a supervisor before us placed."""
        names = [name for name in list_named_actors() if name.startswith(_KEEPER)]
        return {name.removeprefix(_KEEPER): ray.get_actor(name) for name in names}

    def _run(self) -> None:
        while not self._ended.wait(_TICK_S):
            try:
                with self._lock:
                    if not self._ended.is_set():
                        self._reconcile()
            except (RayError, ValueError) as error:
                _log.warning("not reconciled: %s", error)

    def _reconcile(self) -> None:
        fitting = [node for node in ray.nodes() if node["Alive"] and self._fits(node)]
        alive = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in fitting}
        for node_id in self._keepers.keys() - alive.keys():
            ray.kill(self._keepers.pop(node_id))  # its host is gone, so Ray could only wait for it
        wanted = len(alive) if self._spec.hosts == "all" else self._spec.hosts
        for node_id in sorted(alive.keys() - self._keepers.keys()):
            if len(self._keepers) < wanted:
                discovery = self._discovery(frozenset(alive.values()))
                self._keepers[node_id] = self._place(node_id, alive[node_id], discovery)
        self._state = ClusterState(self._spec, self._reports(), wanted)

    def _fits(self, node: dict[str, Any]) -> bool:
        has = node.get("Resources", {})
        return bool(has.get("CPU", 0) >= self._spec.cpus and has.get("GPU", 0) >= self._spec.gpus)

    def _discovery(self, addresses: frozenset[str]) -> str:
        """Where nodes find each other; nowhere if they are on several hosts and have no secret."""
        if len(addresses) > 1 and not is_secret(self._spec.kvist):
            _log.warning("nodes share no blocks between hosts: there is no node.peers.token_file")
            return ""
        return f"{ray.get_runtime_context().gcs_address}/{self._spec.name}"

    def _place(self, node_id: str, address: str, discovery: str) -> Any:
        orders = HostOrders(
            name=self._spec.name,
            node=node_id[:_SHORT_ID],
            folder="",
            kvist=self._spec.kvist,
            engines=self._spec.engines,
            address=address,
            discovery=discovery,
        )
        return (
            ray.remote(Keeper)
            .options(
                name=_KEEPER + node_id,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                max_concurrency=2,  # it reports while it stops
                num_cpus=self._spec.cpus,
                num_gpus=self._spec.gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(msgspec.json.encode(orders))
        )

    def _reports(self) -> tuple[HostReport, ...]:
        refs = {node_id: keeper.report.remote() for node_id, keeper in self._keepers.items()}
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=_ANSWER_S) if refs else None
        found = []
        for node_id, ref in sorted(refs.items()):
            try:
                found.append(msgspec.json.decode(ray.get(ref, timeout=0.1), type=HostReport))
            except RayError:
                found.append(HostReport(node_id[:_SHORT_ID], "", ""))
        return tuple(found)

    def state(self) -> bytes:
        """The `ClusterState` as of the last round, JSON."""
        return msgspec.json.encode(self._state)

    def stop(self) -> None:
        """Ends every host, and returns when they have ended; the actor itself is then idle."""
        self._ended.set()
        with self._lock:
            stop_keepers(list(self._keepers.values()))
            self._keepers.clear()


def stop_keepers(keepers: list[Any]) -> None:
    """Has every keeper end its host, all at once, then ends the keepers."""
    refs = [keeper.stop.remote() for keeper in keepers]
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=STOP_S + _ANSWER_S)
    for keeper in keepers:
        ray.kill(keeper)


def find_keepers() -> list[Any]:
    """Handles of all keepers in this namespace."""
    names = [name for name in list_named_actors() if name.startswith(_KEEPER)]
    return [ray.get_actor(name) for name in names]


def wait_gone(names: frozenset[str], deadline_s: float) -> bool:
    """Whether Ray has forgotten actors of these names within `deadline_s`."""
    until, pause = time.monotonic() + deadline_s, threading.Event()
    while names & set(list_named_actors()):
        if time.monotonic() > until:
            return False
        pause.wait(_TICK_S)
    return True
