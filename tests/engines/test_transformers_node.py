"""Transformers on a node: what one process computed serves another, and the node may die."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

if (folder := str(Path(__file__).parents[1] / "node")) not in sys.path:
    sys.path.insert(0, folder)

from node_process import PAGE_BYTES, NodeProcess, eventually  # noqa: E402

from kvist.bench.document import long_document  # noqa: E402
from kvist.connectors.identity import fingerprint  # noqa: E402
from kvist.connectors.transformers import TransformersKvist  # noqa: E402
from kvist.core.keyspace import Keyspace  # noqa: E402
from kvist.node.client import NodeStore  # noqa: E402
from kvist.node.keyspaces import Attach  # noqa: E402

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

BLOCK = 16
TOKENS = 100
NEW = 4
DRAM_BYTES = 64 << 20


def session(model: Any, folder: Path, node: NodeProcess) -> TransformersKvist:
    def open_store(keyspace: Keyspace) -> NodeStore:
        size = keyspace.layout.block_bytes
        return NodeStore(node.path, Attach(fingerprint(keyspace), "", size))

    return TransformersKvist.open(model, store=open_store, model_path=folder, block_tokens=BLOCK)


def generate(kv: TransformersKvist, row: Any) -> list[int]:
    out = kv.generate(row, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW)
    return list(out[0].tolist())


def test_sessions_share_a_node_and_outlive_it(
    smollm2: Any, smollm2_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    row = torch.tensor([tokenizer.encode(long_document(200, tokenizer))[:TOKENS]])
    with NodeProcess(tmp_path / "n.sock", slots=DRAM_BYTES // PAGE_BYTES) as node:
        first, second = (session(smollm2, smollm2_folder, node) for _ in range(2))
        right = generate(first, row)
        assert first.last.tokens_by_tier == {}
        assert generate(second, row) == right
        assert second.last.tokens_by_tier == {"dram": TOKENS // BLOCK * BLOCK}
        node.kill()
        assert generate(second, row) == right
        assert second.last.tokens_by_tier == {}
        node.start_again()
        for kv in (first, second):
            assert isinstance(kv.store, NodeStore)
            eventually(lambda store=kv.store: store.attached)
        assert generate(first, row) == right
        assert generate(second, row) == right
        assert second.last.tokens_by_tier == {"dram": TOKENS // BLOCK * BLOCK}
        assert node.store_stats()["leases"] == 0
        for kv in (first, second):
            assert isinstance(kv.store, NodeStore)
            kv.store.close()
