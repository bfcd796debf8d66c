"""`kvist serve`: checks everything it can in a second, then runs vLLM with Kvist as its child.

With several engines it is `serve_fleet.py` that runs them.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvist.assemble import node_place
from kvist.cli import screen, serve_checks, serve_fleet
from kvist.cli.serve_events import events_args
from kvist.cli.vllm_child import ServerFailed, VllmServer, phase_of, stop_signals
from kvist.config import LoadedConfig, dram_bytes, read_machine, ssd_bytes, ssd_folder
from kvist.core.errors import ConfigError

DEFAULT_PORT = 8000
_READY_DEADLINE_S = 3600.0  # a large model is fetched and loaded meanwhile
_SHOWN_TAIL_LINES = 20
_TICK_S = 0.5
_PLAIN_EVERY_S = 15.0
_GIB = 1 << 30
_MAX_CPU_KV_GIB = 4
_OURS = ("--kv-transfer-config", "--model", "--uds")


def add_parser(subparsers: object) -> None:
    """Adds `serve`."""
    parser = screen.add_command(
        subparsers,
        "serve",
        summary="serve a model with vLLM and Kvist",
        details="Checks the configuration, the SSD folder, the model, vLLM and the port first. "
        "Options that are not listed here go to vLLM as they are. With --replicas, or --prefill "
        "and --decode, it runs several engines on one node, and a gateway before them; what ends "
        "is started again. Ctrl-C stops everything.",
        example="kvist serve Qwen/Qwen3-0.6B --port 8000 --max-model-len 8192",
    )
    parser.add_argument("model", help="folder of a Hugging Face model, or its name on the hub")
    _add_options(parser)
    parser.add_argument(
        "vllm_args",
        nargs=argparse.REMAINDER,
        help="options of vLLM, such as --dtype bfloat16; they come after MODEL",
    )
    parser.set_defaults(print_help=parser.print_help)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="port to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    serve_fleet.add_options(parser)
    screen.add_config_options(parser)
    screen.add_json_option(parser)
    parser.add_argument("--verbose", action="store_true", help="show everything that vLLM says")


def run(args: argparse.Namespace) -> int:
    """Serves until the user stops it (0) or vLLM ends by itself (its status).

    Raises:
        ConfigError: a check failed; nothing was started.
    """
    args, vllm_args = _ours_and_vllms(args)
    if args.help_wanted:
        args.print_help()
        return 0
    pools = serve_fleet.pools_of(args)
    loaded = screen.config_from(args)
    _check_args(vllm_args)
    block_tokens = loaded.config.block_tokens
    serve_checks.check_port(args.host, args.port)
    package = serve_checks.vllm_package()
    serve_checks.check_model(args.model, block_tokens)
    serve_checks.check_blocks(block_tokens, vllm_args, package)
    if pools is not None:
        serve_checks.check_own(loaded)  # its node owns the store
        return serve_fleet.run(args, vllm_args, pools, _named(args.model))
    serve_checks.check_machine(loaded)
    model = _named(args.model)
    command = [
        *("--model", model),
        *("--host", args.host),
        *("--port", str(args.port)),
        *("--kv-transfer-config", serve_checks.transfer_config(loaded)),
        *events_args(loaded.config.events, args.port, vllm_args),
        *vllm_args,
    ]
    env = serve_checks.server_env(package, cpu_kv_gib())
    output = _Output(verbose=args.verbose)
    try:
        with (
            stop_signals(),
            VllmServer(
                command, env=env, host=args.host, port=args.port, on_line=output.line
            ) as server,
        ):
            try:
                return _serve(server, output, args, loaded)
            except KeyboardInterrupt:
                output.say("kvist: stopping (Ctrl-C again to hurry)")
    except ServerFailed as failed:
        if not args.verbose:
            for line in failed.tail[-_SHOWN_TAIL_LINES:]:
                output.say(line)
        output.say(f"kvist: error: {failed}")
        return failed.code
    output.say("kvist: stopped")
    if args.json:
        print(json.dumps({"state": "stopped"}), flush=True)
    return 0


def _named(model: str) -> str:
    """The folder of a model, or its name on the hub."""
    return str(Path(model).expanduser()) if Path(model).exists() else model


def cpu_kv_gib() -> int:
    """GiB for vLLM's own KV cache on a CPU: an eighth of what is free, from 1 to 4."""
    return max(1, min(_MAX_CPU_KV_GIB, read_machine().available_bytes // 8 // _GIB))


def _serve(
    server: VllmServer, output: _Output, args: argparse.Namespace, loaded: LoadedConfig
) -> int:
    with output.progress():
        server.wait_ready(_READY_DEADLINE_S)
    if args.json:
        told = {"state": "ready", "url": server.url, "model": args.model}
        print(json.dumps(told), flush=True)
    else:
        print(f"kvist: ready on {server.url} ({_summary(args.model, loaded)})")
        print(f"  curl {server.url}/v1/models", flush=True)
    while (code := server.wait(_TICK_S)) is None:
        pass
    if code:
        raise server.failure(code)
    return 0


def _summary(model: str, loaded: LoadedConfig) -> str:
    config = loaded.config
    if config.store.where != "embedded":
        return f"model {model}, store of the node at {node_place(config).socket}"
    parts = [f"model {model}", f"DRAM {screen.format_bytes(dram_bytes(config))}"]
    if config.store.ssd.enabled:
        folder = str(ssd_folder(config)).replace(str(Path.home()), "~", 1)
        parts.append(f"SSD {folder} {screen.format_bytes(ssd_bytes(config))}")
    return ", ".join(parts)


def _ours_and_vllms(args: argparse.Namespace) -> tuple[argparse.Namespace, list[str]]:
    """Our options may stand after MODEL, among vLLM's."""
    parser = _Options(prog="kvist serve", add_help=False, allow_abbrev=False)
    _add_options(parser)
    parser.add_argument("-h", "--help", dest="help_wanted", action="store_true")
    args, rest = parser.parse_known_args(args.vllm_args, namespace=args)
    return args, [arg for i, arg in enumerate(rest) if not (i == 0 and arg == "--")]


class _Options(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message} (see kvist serve --help)")


def _check_args(vllm_args: Sequence[str]) -> None:
    for arg in vllm_args:
        if arg.partition("=")[0].replace("_", "-") in _OURS:
            raise ConfigError(
                "is set by kvist serve", path=arg.partition("=")[0], remedy="leave it out"
            )
    if vllm_args and not vllm_args[0].startswith("-"):
        raise ConfigError(
            "there is one MODEL, and options follow it",
            path=vllm_args[0],
            remedy="leave it out, or see kvist serve --help",
        )


class _Output:
    """What a server's start looks like: everything, or one line that says how far it is."""

    def __init__(self, *, verbose: bool) -> None:
        self._verbose = verbose
        self._live = sys.stderr.isatty() and not verbose
        self._phase = "starting vLLM"
        self._ready = False

    def line(self, text: str) -> None:
        """One line of the server's output."""
        self._phase = phase_of(text) or self._phase
        # Once it serves, only what went wrong is worth a line.
        if self._verbose or (self._ready and " ERROR " in text[:80]):
            self.say(text)

    def say(self, text: str) -> None:
        """One line on stderr."""
        print(text, file=sys.stderr, flush=True)

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Shows phase and elapsed seconds while the body waits for the server."""
        done = threading.Event()
        thread = threading.Thread(target=self._tick, args=(done,), name="kvist-progress")
        if not self._verbose:
            thread.start()
        try:
            yield
            self._ready = True
        finally:
            done.set()
            if not self._verbose:
                thread.join(timeout=5.0)

    def _tick(self, done: threading.Event) -> None:
        began, said, said_s = time.monotonic(), "", 0.0
        while not done.wait(_TICK_S):
            elapsed_s = time.monotonic() - began
            text = f"kvist: {self._phase}…"
            if self._live:
                sys.stderr.write(f"\r\x1b[2K{text} {elapsed_s:.0f} s")
                sys.stderr.flush()
            elif text != said or elapsed_s - said_s >= _PLAIN_EVERY_S:
                said, said_s = text, elapsed_s
                self.say(f"{text} {elapsed_s:.0f} s")
        if self._live:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
