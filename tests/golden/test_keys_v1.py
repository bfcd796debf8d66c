"""Key vectors, version 1: a promise to every store ever written and to other languages.

A change that fails here makes each stored block unreachable: it needs a new version, not new
vectors. The file is read, never written, by tests; without it they fail.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import blake3
import pytest

from kvist.core.keys import RequestScope, seed_bytes
from kvist.core.keyspace import Keyspace
from kvist.core.layout import BlockLayout

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "keys_v1.json").read_text(encoding="utf-8")
)["vectors"]
NAMES = ["twin"] if os.environ.get("KVIST_NATIVE") == "off" else ["twin", "_core"]


@pytest.fixture(scope="module", params=NAMES)
def native(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"kvist.native.{request.param}")


def test_the_file_holds_all_its_vectors() -> None:
    assert len(VECTORS) == 11
    assert {v["block_tokens"] for v in VECTORS} >= {1, 16, 128, 512}
    assert {0, 2**32 - 1} <= {t for v in VECTORS for t in v["tokens"]}


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_chain_gives_the_golden_keys(native: ModuleType, vector: dict[str, Any]) -> None:
    extras = {int(i): bytes.fromhex(text) for i, text in vector["extras"].items()}
    keys = native.chain_keys(
        bytes.fromhex(vector["seed_hex"]), vector["tokens"], vector["block_tokens"], extras
    )
    assert [key.hex() for key in keys] == vector["keys_hex"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_golden_keys_follow_from_the_published_hash(vector: dict[str, Any]) -> None:
    key, width = bytes.fromhex(vector["seed_hex"]), vector["block_tokens"]
    for i, want in enumerate(vector["keys_hex"]):
        tokens = vector["tokens"][i * width : (i + 1) * width]
        text = b"".join(t.to_bytes(4, "little") for t in tokens)
        extra = bytes.fromhex(vector["extras"].get(str(i), ""))
        key = blake3.blake3(key + text + extra).digest()
        assert key.hex() == want


@pytest.mark.parametrize("vector", [v for v in VECTORS if "keyspace" in v], ids=lambda v: v["name"])
def test_seed_follows_from_keyspace_and_scope(native: ModuleType, vector: dict[str, Any]) -> None:
    fields = json.loads(vector["keyspace"])
    keyspace = Keyspace(
        weights=fields["weights"],
        layout=BlockLayout(
            fields["layers"],
            fields["kv_heads"],
            fields["head_dim"],
            fields["block_tokens"],
            fields["kv_dtype"],
            fields["kinds"],
        ),
        rope=fields["rope"],
        windows=fields["windows"],
        quantisation=fields["quantisation"],
        activation_dtype=fields["activation_dtype"],
    )
    assert keyspace.canonical_bytes() == vector["keyspace"].encode()
    fingerprint = native.digest(keyspace.canonical_bytes())
    assert fingerprint.hex() == vector["fingerprint_hex"]
    scope = RequestScope(lora=vector["lora"], salt=vector["salt"])
    assert native.digest(seed_bytes(fingerprint, scope)).hex() == vector["seed_hex"]
