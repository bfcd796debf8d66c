"""The schema as a flat list of knobs: what loading, documentation and tests walk."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from kvist.config.schema import Config


@dataclass(frozen=True, slots=True)
class Knob:
    """One leaf of the schema; `path` is dotted, `type` what `msgspec.convert` understands."""

    path: str
    type: Any
    default: object
    description: str
    is_size: bool

    @property
    def env(self) -> str:
        """Name of the environment variable that sets it."""
        return "KVIST_" + self.path.upper().replace(".", "__")

    def choices(self) -> str:
        """The accepted values, for people."""
        return _describe(self.type, is_size=self.is_size)


def knobs() -> dict[str, Knob]:
    """Every knob by path, in the order of the schema."""
    return {knob.path: knob for knob in _walk(Config, "")}


def _walk(struct: type[msgspec.Struct], prefix: str) -> Iterator[Knob]:
    hints = typing.get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        kind, path = hints[field.name], prefix + field.name
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from _walk(kind, path + ".")
            continue
        metas = [m for m in getattr(kind, "__metadata__", ()) if isinstance(m, msgspec.Meta)]
        yield Knob(
            path=path,
            type=kind,
            default=field.default,
            description=" ".join(_descriptions(kind)),
            is_size=any((m.extra or {}).get("size", False) for m in metas),
        )


def _descriptions(kind: Any) -> Iterator[str]:
    """What the annotations of a type, or of the members of a union, say of its meaning."""
    for meta in getattr(kind, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta) and meta.description:
            yield meta.description
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        for member in typing.get_args(kind):
            yield from _descriptions(member)


def _describe(kind: Any, *, is_size: bool) -> str:
    bounds = ""
    if typing.get_origin(kind) is typing.Annotated:
        for meta in kind.__metadata__:
            limits = ((" above ", meta.gt), (" from ", meta.ge), (" to ", meta.le))
            bounds += "".join(f"{word}{limit}" for word, limit in limits if limit is not None)
        kind = kind.__origin__
    args = typing.get_args(kind)
    if typing.get_origin(kind) is dict:
        return f"mapping of name to {_describe(args[1], is_size=is_size)}"
    if typing.get_origin(kind) is tuple:
        return "list of " + _describe(args[0], is_size=is_size)
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{a}`" for a in args)
    if args:
        return " or ".join(_describe(a, is_size=is_size) for a in args) + bounds
    name = {int: "size" if is_size else "integer", float: "number", bool: "true or false"}
    return name.get(kind, "text") + bounds
