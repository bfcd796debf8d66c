"""`kvist config show` and `kvist config check`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from kvist.cli import screen
from kvist.config import (
    LoadedConfig,
    Problem,
    as_mapping,
    dram_bytes,
    format_size,
    knobs,
    preflight,
    remote_answers,
    ssd_bytes,
    ssd_folder,
    value_at,
    without_password,
)


def add_parser(subparsers: Any) -> None:
    """Adds `config` and its two commands."""
    parser = screen.add_command(
        subparsers,
        "config",
        summary="show or check the configuration",
        example="kvist config show",
    )
    inner = parser.add_subparsers(dest="config_command", metavar="COMMAND", required=True)
    show = screen.add_command(
        inner,
        "show",
        summary="print every knob, its value and where the value came from",
        example="kvist config show --set store.dram.capacity=8GiB",
    )
    check = screen.add_command(
        inner,
        "check",
        summary="check the configuration against this machine",
        details="Makes the SSD folder and writes a probe file in it; asks the remote, if there is "
        "one, for an answer; where it says something of a gateway or its router, looks at that, "
        "too. Exits with 1 if Kvist would not start well.",
        example="kvist config check",
    )
    for command in (show, check):
        screen.add_config_options(command)
        screen.add_json_option(command)


def run(args: argparse.Namespace) -> int:
    """Shows or checks.

    Raises:
        ConfigError: the configuration cannot be read.
    """
    loaded = screen.config_from(args)
    if args.config_command == "show":
        return _show(loaded, as_json=args.json)
    return _check(loaded, as_json=args.json)


def _show(loaded: LoadedConfig, *, as_json: bool) -> int:
    if as_json:
        config = as_mapping(loaded.config)
        for part in (config["store"]["remote"], config["node"]["cluster"]):
            part["url"] = without_password(part["url"])
        screen.print_json({"config": config, "origins": dict(loaded.origins)})
        return 0
    grid = screen.table("knob", "value", "from")
    for path, knob in knobs().items():
        value = value_at(loaded.config, path)
        is_number = knob.is_size and isinstance(value, int)
        text = format_size(value) if is_number and isinstance(value, int) else str(value)
        text = without_password(text)
        if isinstance(value, bool):
            text = text.lower()
        grid.add_row(path, text, loaded.origins[path])
    screen.console().print(grid)
    return 0


def _check(loaded: LoadedConfig, *, as_json: bool) -> int:
    config = loaded.config
    problems = preflight(config, origins=loaded.origins)
    url = config.store.remote.url
    if url and not problems and (silent := remote_answers(config)) is not None:
        problems = [dataclasses.replace(silent, origin=loaded.origins[silent.path])]
    problems += _gateway_problems(loaded)
    ssd = config.store.ssd.enabled
    folder, ssd_cap_bytes = (str(ssd_folder(config)), ssd_bytes(config)) if ssd else (None, 0)
    if as_json:
        screen.print_json(
            {
                "ok": not problems,
                "problems": [dataclasses.asdict(p) for p in problems],
                "dram_bytes": dram_bytes(config),
                "ssd_bytes": ssd_cap_bytes,
                "ssd_path": folder,
                "remote": without_password(url) or None,
            }
        )
        return int(bool(problems))
    for problem in problems:
        print(problem)
    if problems:
        return 1
    print(f"dram  {screen.format_bytes(dram_bytes(config))}")
    print(f"ssd   {screen.format_bytes(ssd_cap_bytes)} in {folder}" if ssd else "ssd   off")
    print(f"remote {without_password(url)}" if url else "remote off")
    print("ok")
    return 0


def _gateway_problems(loaded: LoadedConfig) -> list[Problem]:
    """Why a gateway could not be as the configuration says, if it says anything of one."""
    said = [path for path, origin in loaded.origins.items() if origin != "default"]
    said = [path for path in said if path.startswith(("gateway.", "router."))]
    if not said:
        return []
    try:
        from kvist.assemble.gateway import gateway_faults
    except ImportError as error:
        needs = f"the gateway needs {error.name}"
        return [Problem(said[0], needs, "pip install 'kvist[gateway]'", loaded.origins[said[0]])]
    found = []
    for fault in gateway_faults(loaded.config):
        path = fault.path.removeprefix("$.")
        above = loaded.origins.get(path.rpartition(".")[0], "default")  # an entry of a mapping
        origin = loaded.origins.get(path, above)
        found.append(Problem(path, fault.message, fault.remedy, origin))
    return found
