"""One host: a node, the engines beside it, and a gateway before them if that is wanted.

Run as `python -m kvist.launch.host`. The first line on stdin holds the orders (`HostOrders`, JSON);
stdout gets a line (`HostReport`) whenever something changed. The end of stdin, whatever its cause,
ends the engines and then the node, which writes what is not on SSD yet: so nothing outlives whoever
gave the orders. `kvist serve` has a `Host` in its own process. Knows nothing of Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import yaml

from kvist.core.errors import NodeAwayError, NodeRefusedError
from kvist.launch.child import Child, Phase, is_healthy, stop_all
from kvist.launch.ports import Port
from kvist.launch.spec import (
    ChildReport,
    EngineSpec,
    FrontSpec,
    HostOrders,
    HostReport,
    for_node,
    heard_by_gateway,
)
from kvist.node import control
from kvist.node.place import Place, default_socket

_TICK_S = 0.25
_ANSWER_S = 2.0
_MOST_ORDERS_BYTES = 4 << 20
_READ_BYTES = 64 << 10
_KVIST = (sys.executable, "-m", "kvist.cli.main")
_NODE_STOPS = ((signal.SIGTERM, 90.0), (signal.SIGKILL, 5.0))
_ENGINE_STOPS = ((signal.SIGTERM, 35.0), (signal.SIGKILL, 5.0))
_GATEWAY_END_S = 10.0  # beyond what its requests are given
_OF_RAY = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")  # Ray sets them for its own worker


class Host:
    """The processes of one host."""

    def __init__(self, orders: HostOrders, env: Mapping[str, str]) -> None:
        """Writes the configuration; starts nothing yet.

        Raises:
            ConfigError: the folder is open to other users.
            OSError: it cannot be written.
        """
        self._orders = orders
        name = f"{orders.name}-{orders.node}"
        self.folder = Path(orders.folder) if orders.folder else default_socket().parent / name
        self.place = Place(self.folder / "node.sock")
        self.place.make_folder()
        self._config = self.folder / "kvist.yaml"
        self._nodes = self.folder / "nodes"
        tree = for_node(orders)
        if orders.front is not None:
            tree = heard_by_gateway(tree, self._nodes)
        tree["node"] = {**tree.get("node", {}), "socket": os.fspath(self.place.socket)}
        with open(self._config, "w", opener=_private) as stream:
            yaml.safe_dump(tree, stream)
        self._wrote = _written(self._config)
        self._env = dict(env)
        self._node = Child(
            "node",
            command=lambda: [*_KVIST, "node", f"--config={self._config}", "--replace"],
            env=self._env,
            log=self.folder / "node.log",
            serves=self._node_serves,
            stops=_NODE_STOPS,
        )
        self._engines: list[tuple[Child, Callable[[], str]]] = []
        self._gateway = None if orders.front is None else self._front(orders.front)
        gpus = list(orders.gpu_ids)
        for spec in orders.engines:
            for _ in range(spec.per_host):
                mine, gpus = gpus[: spec.gpus], gpus[spec.gpus :]
                self._engines.append(self._engine(spec, mine))

    def _engine(self, spec: EngineSpec, gpu_ids: list[str]) -> tuple[Child, Callable[[], str]]:
        port = Port(default_socket().parent / "ports", spec.host, spec.port)
        number = len(self._engines)
        env = {**self._env, **spec.env}
        if gpu_ids:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
        is_fixed = self._orders.front is not None  # a gateway knows it by its port

        def command() -> list[str]:
            number = port.number if is_fixed and port.number else port.choose()
            options = (f"--host={spec.host}", f"--port={number}")
            return [
                *(*_KVIST, "serve", spec.model, *options),
                *(f"--config={self._config}", "--set=store.where=node", *spec.args),
            ]

        def url() -> str:
            shown = f"[{spec.host}]" if ":" in spec.host else spec.host
            return f"http://{shown}:{port.number}" if port.number else ""

        child = Child(
            spec.model,
            command=command,
            env=env,
            log=self.folder / f"engine-{number}.log",
            serves=lambda: is_healthy(f"{url()}/health"),
            stops=_ENGINE_STOPS,
        )
        return child, url

    def _front(self, spec: FrontSpec) -> Child:
        def command() -> list[str]:
            urls = [url() for _, url in self._engines]
            prefill, answer = urls[: spec.prefills], urls[spec.prefills :]
            return [
                *(*_KVIST, "gateway", *answer, *(f"--prefill={each}" for each in prefill)),
                *(f"--config={self._config}", f"--listen={spec.listen}"),
                "--quiet",  # its log has no bound
            ]

        return Child(
            "gateway",
            command=command,
            env=self._env,
            log=self.folder / "gateway.log",
            serves=lambda: is_healthy(f"{self._front_url()}/healthz"),
            stops=((signal.SIGTERM, spec.drain_s + _GATEWAY_END_S), (signal.SIGKILL, 5.0)),
        )

    def _node_serves(self) -> bool:
        try:
            return bool(
                control.ask(self.place.socket, "status", deadline_s=_ANSWER_S)["pid"]
                == self._node.pid
            )
        except (NodeAwayError, NodeRefusedError):
            return False

    def is_open(self) -> bool:
        """Whether the gateway, if there is one, has an engine to send requests to."""
        return self._gateway is None or is_healthy(f"{self._front_url()}/readyz")

    def tick(self) -> None:
        """Looks after every process; engines start once the node serves, then the gateway."""
        self._node.tick()
        for child, _ in self._engines:
            child.tick(may_start=self._node.phase is Phase.READY)
        if self._gateway is not None:
            self._gateway.tick(may_start=all(url() for _, url in self._engines))

    def stop(self) -> None:
        """Ends the gateway when its requests have ended, then the engines, then the node.

        Of the folder, the logs stay.
        """
        stop_all([] if self._gateway is None else [self._gateway])
        stop_all([child for child, _ in self._engines])
        stop_all([self._node])
        self._clean()

    def _clean(self) -> None:
        """Removes what it wrote, which may hold a password; logs stay.

        Not if the next host has written it again: that one began while this one stopped.
        """
        if _written(self._config) != self._wrote:
            return
        for path in (self._config, *self._nodes.glob("*")):
            with contextlib.suppress(OSError):  # it is gone, or not ours
                path.unlink()
        with contextlib.suppress(OSError):
            self._nodes.rmdir()

    def hurry(self) -> None:
        """While it stops, from a signal's handler: what ends now does not wait for anything."""
        for child, _ in self._children():
            child.hurry()

    def _children(self) -> list[tuple[Child, Callable[[], str]]]:
        """Every process, and what gives its URL."""
        front = [] if self._gateway is None else [(self._gateway, self._front_url)]
        return [(self._node, str), *self._engines, *front]

    def _front_url(self) -> str:
        front = self._orders.front
        return "" if front is None else f"{front.scheme}://{front.listen}"

    def report(self) -> HostReport:
        """What holds now."""

        def told(child: Child, url: Callable[[], str]) -> ChildReport:
            shown = url() if child.phase is Phase.READY else ""
            return ChildReport(
                child.what, str(child.phase), child.restarts, child.pid, shown, child.detail
            )

        return HostReport(
            node=self._orders.node,
            machine=socket.gethostname(),
            socket=os.fspath(self.place.socket),
            children=tuple(told(child, url) for child, url in self._children()),
        )


def _written(path: Path) -> int:
    """When a file was written, in ns; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _is_rays(name: str) -> bool:
    return name.startswith("RAY_") or name in _OF_RAY


def _read_orders(fd: int) -> HostOrders:
    held = b""
    while b"\n" not in held:
        data = os.read(fd, _READ_BYTES)
        if not data or len(held) > _MOST_ORDERS_BYTES:
            raise SystemExit("kvist.launch.host: no orders on stdin")
        held += data
    return msgspec.json.decode(held.partition(b"\n")[0], type=HostOrders)


def run(stdin: int, tell: Callable[[HostReport], None]) -> None:
    """Follows the orders that come on `stdin` until it ends, or until a signal."""
    ended = False

    def end(_number: int, _frame: object) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    with contextlib.suppress(PermissionError):  # Ray's workers are nice to everybody else
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    env = {name: value for name, value in os.environ.items() if not _is_rays(name)}
    host = Host(_read_orders(stdin), env)
    last: HostReport | None = None
    try:
        while not ended:
            host.tick()
            if (report := host.report()) != last:
                tell(report)
                last = report
            readable, _, _ = select.select([stdin], [], [], _TICK_S)
            ended = ended or (bool(readable) and not os.read(stdin, _READ_BYTES))
    finally:
        host.stop()
        tell(host.report())


def _tell(report: HostReport) -> None:
    try:
        print(json.dumps(msgspec.to_builtins(report)), flush=True)
    except BrokenPipeError:  # whoever listened is gone; stdin says so as well
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    run(sys.stdin.fileno(), _tell)
