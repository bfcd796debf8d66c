"""`kvist gateway`: one OpenAI-compatible address in front of several engines."""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

from kvist.cli import screen
from kvist.core.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    """Adds `gateway`."""
    parser = screen.add_command(
        subparsers,
        "gateway",
        summary="serve several engines at one OpenAI-compatible address",
        details="Sends each request to one of the engines, goes on at another when one breaks, "
        "keeps tenants to their limits. On SIGTERM it ends when the requests under way have ended. "
        "Each request is logged as one line of JSON on stderr.",
        example="kvist gateway http://127.0.0.1:8001 http://127.0.0.1:8002",
    )
    parser.add_argument(
        "replicas",
        nargs="*",
        metavar="URL",
        help="engines that serve the same model (else gateway.replicas)",
    )
    parser.add_argument(
        "--prefill",
        action="append",
        default=[],
        metavar="URL",
        help="an engine that only computes prompts for the others (else "
        "gateway.disaggregation.prefill); may be repeated",
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help="the same as --set gateway.listen=…")
    parser.add_argument("--quiet", action="store_true", help="log no line for each request")
    screen.add_config_options(parser)
    screen.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: the configuration cannot be used, or a package is missing.
    """
    if args.replicas:
        args.set = [*args.set, f"gateway.replicas={','.join(args.replicas)}"]
    if args.prefill:
        args.set = [*args.set, f"gateway.disaggregation.prefill={','.join(args.prefill)}"]
    if args.listen:
        args.set = [*args.set, f"gateway.listen={args.listen}"]
    loaded = screen.config_from(args)
    try:
        from kvist.assemble.gateway import open_gateway
        from kvist.gateway.run import run as serve
        from kvist.gateway.telemetry import requests_log
    except ImportError as error:
        raise ConfigError(
            f"the gateway needs {error.name}", remedy="pip install 'kvist[gateway]'"
        ) from error
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if args.quiet:
        requests_log.setLevel(logging.WARNING)
    gateway, listener = open_gateway(loaded.config)
    host, port = listener.getsockname()[:2]
    scheme = "https" if gateway.tls else "http"
    url = f"{scheme}://{host}:{port}"

    def tell(state: str, line: str) -> None:
        print(json.dumps({"state": state, "url": url}) if args.json else line, flush=True)

    with listener:
        serve(gateway, listener, lambda: tell("ready", f"kvist: ready on {url}"))
    tell("stopped", "kvist: stopped")
    return 0
