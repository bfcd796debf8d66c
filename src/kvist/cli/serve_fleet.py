"""`kvist serve` with several engines: a node, the engines on it, and a gateway before them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from kvist.cli import screen, serve_checks
from kvist.cli.host_changes import HostChanges
from kvist.config import Config, as_mapping, knobs
from kvist.core.errors import ConfigError
from kvist.launch.gpus import gpu_ids, gpus_an_engine
from kvist.launch.host import Host
from kvist.launch.spec import EngineSpec, FrontSpec, HostOrders, HostReport

_TICK_S = 0.25
_MOST_ENGINES = 64
_MOST_STARTS = 3  # of a process, before anything ever served
_MOST_PORT = 65_535
_EXIT_FAILED = 1


@dataclass(frozen=True, slots=True)
class Pools:
    """How many engines; `prefill` of them only compute prompts for the others."""

    prefill: int
    answer: int

    @property
    def engines(self) -> int:
        """All of them."""
        return self.prefill + self.answer


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--replicas`, `--prefill` and `--decode`."""
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="start N engines on one node, and a gateway at --port before them",
    )
    parser.add_argument(
        "--prefill",
        type=int,
        metavar="P",
        help="start P engines that only compute prompts, for those of --decode",
    )
    parser.add_argument(
        "--decode", type=int, metavar="D", help="start D engines that answer, beside --prefill"
    )


def pools_of(args: argparse.Namespace) -> Pools | None:
    """What the options ask for; None: one engine by itself.

    Raises:
        ConfigError: they contradict each other, or a number makes no sense.
    """
    if args.replicas is None and args.prefill is None and args.decode is None:
        return None
    if (args.prefill is None) != (args.decode is None):
        raise ConfigError(
            "is one pool of two",
            path="--prefill" if args.decode is None else "--decode",
            remedy="give --prefill P and --decode D, or --replicas N",
        )
    if args.replicas is not None and args.prefill is not None:
        raise ConfigError(
            "is not for pools", path="--replicas", remedy="leave it out, or --prefill and --decode"
        )
    for name in ("replicas", "prefill", "decode"):
        number = getattr(args, name)
        if number is not None and not 1 <= number <= _MOST_ENGINES:
            raise ConfigError(
                f"{number} engines cannot be", path=f"--{name}", remedy=f"give 1 to {_MOST_ENGINES}"
            )
    return Pools(args.prefill or 0, args.decode or args.replicas)


def run(args: argparse.Namespace, vllm_args: Sequence[str], pools: Pools, model: str) -> int:
    """Serves until the user stops it.

    Raises:
        ConfigError: a check failed; nothing was started.
    """
    listen = f"[{args.host}]:{args.port}" if ":" in args.host else f"{args.host}:{args.port}"
    first = args.port + 1 if args.port + _MOST_ENGINES < _MOST_PORT else args.port - _MOST_ENGINES
    args.set = [*args.set, f"gateway.listen={listen}"]
    loaded = screen.config_from(args)
    if not loaded.config.gateway.tokenizer and (Path(model) / "tokenizer.json").is_file():
        args.set = [*args.set, f"gateway.tokenizer={model}"]
        loaded = screen.config_from(args)
    _check_gateway(loaded.config, first)
    size = gpus_an_engine(vllm_args)
    gpus = _gpus(size, pools)
    spec = EngineSpec(model, port=first, gpus=size if gpus else 0, args=tuple(vllm_args))
    config = loaded.config.gateway
    host = Host(
        HostOrders(
            name="serve",
            node=str(args.port),
            folder="",
            kvist=as_mapping(loaded.config),
            engines=(msgspec.structs.replace(spec, per_host=pools.engines),),
            gpu_ids=gpus,
            front=FrontSpec(
                listen,
                scheme="https" if config.tls.cert else "http",
                prefills=pools.prefill,
                drain_s=config.leave_s + config.drain_s,
            ),
        ),
        _environment(),
    )
    return _Fleet(host, pools, as_json=args.json).serve(model)


def _environment() -> Mapping[str, str]:
    """Ours without Kvist's knobs, which are in the host's own configuration."""
    of_knobs = {knob.env for knob in knobs().values()}
    return {name: text for name, text in os.environ.items() if name not in of_knobs}


def _check_gateway(config: Config, first_port: int) -> None:
    """Whether a gateway can be made: its packages, its keys, its address.

    Raises:
        ConfigError: it cannot.
    """
    try:
        from kvist.assemble.gateway import open_gateway
    except ImportError as error:
        raise ConfigError(
            f"several engines need a gateway, and that needs {error.name}",
            remedy="pip install 'kvist[gateway]'",
        ) from error
    replace = msgspec.structs.replace
    engine = f"http://127.0.0.1:{first_port}"
    pools = replace(config.gateway.disaggregation, prefill="")
    tried = replace(config.gateway, replicas=engine, disaggregation=pools)
    gateway, listener = open_gateway(replace(config, gateway=tried))
    listener.close()
    gateway.close()


def _gpus(an_engine: int, pools: Pools) -> tuple[str, ...]:
    """The GPUs to be shared out; none where there are none.

    Raises:
        ConfigError: there are too few.
    """
    if serve_checks.vllm_package() == serve_checks.CPU_PACKAGE:
        return ()
    found = gpu_ids(os.environ)
    needed = an_engine * pools.engines
    if found and needed > len(found):
        raise ConfigError(
            f"{pools.engines} engines take {needed} GPUs, and {len(found)} can be seen",
            path="CUDA_VISIBLE_DEVICES",
            remedy="start fewer engines",
        )
    return found


class _Fleet:
    """A host's processes under `kvist serve`."""

    def __init__(self, host: Host, pools: Pools, *, as_json: bool) -> None:
        self._host, self._pools, self._as_json = host, pools, as_json
        self._stop = threading.Event()

    def serve(self, model: str) -> int:
        """Looks after them until a signal (0), or until they prove unable to start (1)."""
        before = {
            number: signal.signal(number, self._end)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN  # `nohup` was asked for
        }
        try:
            return self._run(model)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        if self._stop.is_set():
            self._host.hurry()
        self._stop.set()

    def _run(self, model: str) -> int:
        changes, served, failed = HostChanges(), False, ""
        try:
            while not (self._stop.is_set() or failed):
                self._host.tick()
                report = self._host.report()
                changes.say(report)
                if not served and report.ready and self._host.is_open():
                    served = True
                    self._tell(report, model)
                failed = "" if served else _why_never(report)
                self._stop.wait(_TICK_S)
        finally:
            if not failed:
                self._say("kvist: stopping (Ctrl-C again to hurry)")
            self._host.stop()
        if failed:
            self._say(f"kvist: error: {failed} (logs in {self._host.folder})")
            return _EXIT_FAILED
        self._say("kvist: stopped")
        if self._as_json:
            print(json.dumps({"state": "stopped"}), flush=True)
        return 0

    def _tell(self, report: HostReport, model: str) -> None:
        *others, gateway = report.children
        urls = [child.url for child in others[1:]]
        prefill, answer = urls[: self._pools.prefill], urls[self._pools.prefill :]
        if self._as_json:
            told = {"state": "ready", "url": gateway.url, "model": model, "socket": report.socket}
            print(json.dumps({**told, "prefill": prefill, "replicas": answer}), flush=True)
            return
        count = f"{len(answer)} engines"
        if prefill:
            count = f"{len(prefill)} engines that prefill, {len(answer)} that decode"
        print(f"kvist: ready on {gateway.url} (model {model}, {count}, node at {report.socket})")
        print(f"  curl {gateway.url}/v1/models", flush=True)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _why_never(report: HostReport) -> str:
    """Why the host will not come to serve; empty while it may."""
    for child in report.children:
        if child.restarts >= _MOST_STARTS:
            return f"{child.what} does not start: {child.detail}"
    return ""
