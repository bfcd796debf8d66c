"""From defaults, a YAML file, the environment, the engine and `--set` to one `Config`.

Each source is flattened to `path → value`, and each value is checked on its own, so that an error
can name the source it came from. Later sources win: defaults < file < environment < engine < set.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kvist.config.knobs import Knob, knobs
from kvist.config.schema import Config
from kvist.config.size import parse_size
from kvist.core.errors import ConfigError

DEFAULT_FILE = "kvist.yaml"
FILE_VARIABLE = "KVIST_CONFIG"
_PREFIX = "KVIST_"
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and, by knob path, where each value came from (`default` if nowhere)."""

    config: Config
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Setting:
    """One value from one source. `lax`: it is text that stands for a number or a bool."""

    path: str
    value: object
    origin: str
    lax: bool


def load_config(
    file: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    *,
    overrides_origin: str = "kv_connector_extra_config",
) -> LoadedConfig:
    """Reads every source and checks it.

    Args:
        file: YAML file; else the variable KVIST_CONFIG; else ./kvist.yaml if there is one.
        env: the environment; the process's own by default.
        overrides: what the engine gives: nested mappings, or dotted keys.
        sets: `path=value` texts of the command line.
        overrides_origin: how errors call `overrides`.

    Raises:
        ConfigError: a file that cannot be read, an unknown knob, or a value that cannot be used.
    """
    env = os.environ if env is None else env
    known = knobs()
    values: dict[str, object] = {}
    origins = dict.fromkeys(known, "default")
    for setting in (
        *_from_file(file, env),
        *_from_env(env, known),
        *_flatten(overrides or {}, "", overrides_origin, known),
        *_from_sets(sets),
    ):
        values[setting.path] = _checked(setting, known)
        origins[setting.path] = setting.origin
    return LoadedConfig(msgspec.convert(_nested(values), Config), origins)


def as_mapping(config: Config) -> dict[str, Any]:
    """`config` as nested plain values, as `kvist config show` prints and YAML reads."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return plain


def value_at(config: Config, path: str) -> object:
    """The value of the knob at dotted `path`."""
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _from_file(file: str | os.PathLike[str] | None, env: Mapping[str, str]) -> Iterator[_Setting]:
    if file is not None:
        path, origin = Path(file), "--config"
    elif env.get(FILE_VARIABLE):
        path, origin = Path(env[FILE_VARIABLE]), FILE_VARIABLE
    elif (path := Path(DEFAULT_FILE)).is_file():
        origin = "the working directory"
    else:
        return
    try:
        with path.expanduser().open("rb") as stream:
            raw = stream.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}",
            origin=origin,
            remedy="give the path of a YAML file that this user can read",
        ) from error
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError("is above 1 MiB", origin=str(path), remedy="is it the right file?")
    try:
        tree = yaml.safe_load(raw.decode())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        fault = " ".join(str(error).split())
        raise ConfigError(
            f"is not YAML: {fault}", origin=str(path), remedy="see docs/configuration.md"
        ) from error
    if tree is None:
        return
    if not isinstance(tree, dict):
        raise ConfigError(
            f"holds a {type(tree).__name__}, not a mapping",
            origin=str(path),
            remedy='begin with a line such as "store:"',
        )
    yield from _flatten(tree, "", str(path), knobs())


def _from_env(env: Mapping[str, str], known: Mapping[str, Knob]) -> Iterator[_Setting]:
    by_name = {knob.env: knob.path for knob in known.values()}
    for name in sorted(env):
        if not name.startswith(_PREFIX) or name == FILE_VARIABLE:
            continue
        if name in by_name:
            yield _Setting(by_name[name], env[name], name, lax=True)
        elif near := difflib.get_close_matches(name, by_name, n=1, cutoff=0.85):
            raise ConfigError("sets no knob", origin=name, remedy=f"did you mean {near[0]}?")
        elif "__" in name:
            raise ConfigError("sets no knob", origin=name, remedy="see `kvist config show`")
        # Any other KVIST_ variable is not about configuration (tests and tools have some).


def _from_sets(sets: Sequence[str]) -> Iterator[_Setting]:
    for text in sets:
        path, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(
                f"{text!r} has no value", origin="--set", remedy="write --set path=value"
            )
        yield _Setting(path.strip().removeprefix("$."), value.strip(), "--set", lax=True)


def _flatten(
    tree: Mapping[Any, Any], prefix: str, origin: str, known: Mapping[str, Knob]
) -> Iterator[_Setting]:
    sections = {path.rsplit(".", i)[0] for path in known for i in range(1, path.count(".") + 1)}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if path in sections:
            if value is None:  # a section whose every line is commented out
                continue
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"is a section, not {value!r}",
                    path=f"$.{path}",
                    origin=origin,
                    remedy="set the knobs under it",
                )
            yield from _flatten(value, path + ".", origin, known)
        else:
            yield _Setting(path, value, origin, lax=False)


def _checked(setting: _Setting, known: Mapping[str, Knob]) -> object:
    """The value in the knob's own type."""
    path, origin = f"$.{setting.path}", setting.origin
    knob = known.get(setting.path)
    if knob is None:
        is_section = any(name.startswith(setting.path + ".") for name in known)
        near = [] if is_section else difflib.get_close_matches(setting.path, known, 1, 0.6)
        raise ConfigError(
            "no such knob",
            path=path,
            origin=origin,
            remedy=f"did you mean {near[0]}?" if near else "see `kvist config show`",
        )
    value = setting.value
    if knob.is_size and value != "auto":
        value = parse_size(value, path, origin)
    elif setting.lax and isinstance(value, str) and value.isdigit():
        value = int(value) if knob.default not in (True, False) else value
    try:
        return msgspec.convert(value, knob.type, strict=not setting.lax)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"cannot be {setting.value!r}",
            path=path,
            origin=origin,
            remedy=f"accepted: {knob.choices().replace('`', '')}",
        ) from error


def _nested(values: Mapping[str, object]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree
