"""Where the engine of `kvist serve` publishes KV events, for a gateway on its host to hear."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kvist.cli.serve_checks import option_value
from kvist.config import EventsConfig
from kvist.core.errors import ConfigError
from kvist.node.place import Place, engine_endpoints

_OURS = "--kv-events-config"
_RANKS = ("--data-parallel-size", "-dp")  # each rank would need an endpoint of its own


def events_args(config: EventsConfig, port: int, vllm_args: Sequence[str]) -> list[str]:
    """Options of vLLM that have it publish; none where somebody has said what it publishes.

    Nor are there any where this user has no folder for the endpoints: that is said on stderr, and
    the engine serves all the same.
    """
    ranks = any(option_value(vllm_args, name) not in (None, "1") for name in _RANKS)
    if not config.enabled or ranks or option_value(vllm_args, _OURS) is not None:
        return []
    if any(arg.startswith(f"{_OURS}.") for arg in vllm_args):  # vLLM takes its fields one by one
        return []
    events, replay = engine_endpoints(port)
    try:
        Place(Path(events.removeprefix("ipc://"))).make_folder()
    except (ConfigError, OSError) as error:
        print(f"kvist: no gateway hears this engine: {error}", file=sys.stderr)
        return []
    wanted = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events}
    return [_OURS, json.dumps(wanted | {"replay_endpoint": replay})]
