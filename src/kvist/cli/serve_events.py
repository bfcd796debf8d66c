"""Where the engine of `kvist serve` publishes KV events, for a gateway on its host to hear."""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvist.cli.serve_checks import option_value
from kvist.config import EventsConfig
from kvist.node.place import Place, default_socket, engine_endpoints

_OURS = "--kv-events-config"
_RANKS = ("--data-parallel-size", "-dp")  # each rank would need an endpoint of its own


def events_args(config: EventsConfig, port: int, vllm_args: Sequence[str]) -> list[str]:
    """Options of vLLM that have it publish; none where somebody has said what it publishes.

    Raises:
        ConfigError: the folder of the endpoints is open to other users.
    """
    ranks = any(option_value(vllm_args, name) not in (None, "1") for name in _RANKS)
    if not config.enabled or ranks or option_value(vllm_args, _OURS) is not None:
        return []
    if any(arg.startswith(f"{_OURS}.") for arg in vllm_args):  # vLLM takes its fields one by one
        return []
    Place(default_socket()).make_folder()
    events, replay = engine_endpoints(port)
    wanted = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events}
    return [_OURS, json.dumps(wanted | {"replay_endpoint": replay})]
