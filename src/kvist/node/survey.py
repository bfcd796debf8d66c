"""What a node shows of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import Enum

import msgspec

from kvist.core.errors import StoreError
from kvist.node.keyspaces import Keyspace


def status(facts: Mapping[str, object], keyspaces: Sequence[Keyspace]) -> str:
    """The node and its stores, as JSON."""
    return _json({**facts, "keyspaces": [_one(keyspace) for keyspace in keyspaces]})


def check(facts: Mapping[str, object], keyspaces: Sequence[Keyspace]) -> str:
    """Which stores have broken a rule of theirs, as JSON: none, where all is well."""
    broken = {}
    for keyspace in keyspaces:
        try:
            keyspace.store.check_integrity()
        except StoreError as error:
            broken[keyspace.attach.fingerprint.hex()] = str(error)
    return _json({"pid": facts["pid"], "broken": broken})


def _one(keyspace: Keyspace) -> dict[str, object]:
    found: dict[str, object] = {
        "fingerprint": keyspace.attach.fingerprint.hex(),
        "layout": keyspace.attach.layout,
        "block_bytes": keyspace.attach.block_bytes,
        "sessions": len(keyspace.sessions),
    }
    return found | asdict(keyspace.store.stats()) | {"samples": dict(keyspace.store.samples())}


def _json(found: object) -> str:
    return msgspec.json.encode(found, enc_hook=_plain).decode()


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    raise NotImplementedError(f"a {type(value)} in a status")
