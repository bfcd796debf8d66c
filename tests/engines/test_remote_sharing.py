"""Two engines with stores of their own and one remote: equal output, whatever the remote does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvist.assemble import open_embedded_store  # noqa: E402
from kvist.bench.document import long_document  # noqa: E402
from kvist.config import load_config  # noqa: E402
from kvist.connectors.identity import fingerprint  # noqa: E402
from kvist.connectors.transformers import TransformersKvist  # noqa: E402
from kvist.core.keyspace import Keyspace  # noqa: E402
from kvist.store import TieredStore  # noqa: E402
from kvist.tiers.stacked import StackedTier  # noqa: E402

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

BLOCK = 16
NEW = 8
PROMPT = 200
WHOLE = 192  # tokens of whole blocks
WAIT_S = 30.0


def engine(model: Any, folder: Path, root: Path, name: str) -> TransformersKvist:
    """An engine on host `name`: its own DRAM and SSD, the remote that all share."""
    config = load_config(
        env={},
        overrides={
            "store": {
                "dram": {"capacity": "64MiB", "restore": 0.0},
                "ssd": {"path": str(root / name), "capacity": "256MiB"},
                "remote": {"url": f"file://{root}/shared", "probe_s": 1.0, "timeout_s": 20.0},
            }
        },
    ).config

    def store(keyspace: Keyspace) -> TieredStore:
        opened = open_embedded_store(
            config,
            block_bytes=keyspace.layout.block_bytes,
            fingerprint=fingerprint(keyspace),
        )
        link = opened._link
        assert link is not None
        assert isinstance(link.tier, StackedTier)
        assert link.tier._remote.wait_listed(WAIT_S)
        return opened

    return TransformersKvist.open(model, store=store, model_path=folder, block_tokens=BLOCK)


def generate(kv: TransformersKvist, tokens: list[int]) -> list[int]:
    row = torch.tensor([tokens])
    out = kv.generate(row, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW)
    return list(out[0].tolist())


def close(kv: TransformersKvist) -> None:
    assert isinstance(kv.store, TieredStore)
    assert kv.store.flush(WAIT_S)
    kv.store.close()


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> list[int]:
    return list(tokenizer.encode(long_document(300, tokenizer)))[:PROMPT]


@pytest.fixture(scope="module")
def want(smollm2: Any, prompt: list[int]) -> list[int]:
    with torch.no_grad():
        out = smollm2.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, PROMPT, dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
        )
    return list(out[0].tolist())


def test_what_one_host_computed_another_loads_with_equal_output(
    smollm2: Any, smollm2_folder: Path, tmp_path: Path, prompt: list[int], want: list[int]
) -> None:
    one = engine(smollm2, smollm2_folder, tmp_path, "one")
    assert generate(one, prompt) == want
    assert one.last.tokens_by_tier == {}
    close(one)
    two = engine(smollm2, smollm2_folder, tmp_path, "two")
    assert generate(two, prompt) == want
    assert two.last.tokens_by_tier == {"remote": WHOLE}
    assert two.last.faults == {}
    close(two)


@pytest.mark.parametrize("fault", ["flipped", "cut", "gone"])
def test_objects_that_are_spoilt_are_recomputed_with_equal_output(
    smollm2: Any,
    smollm2_folder: Path,
    tmp_path: Path,
    prompt: list[int],
    want: list[int],
    fault: str,
) -> None:
    one = engine(smollm2, smollm2_folder, tmp_path, "one")
    generate(one, prompt)
    close(one)
    files = [p for p in (tmp_path / "shared" / "objects").rglob("*") if p.is_file()]
    assert len(files) >= WHOLE // BLOCK
    two = engine(smollm2, smollm2_folder, tmp_path, "two")
    for path in files[::2]:
        data = bytearray(path.read_bytes())
        if fault == "flipped":
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        elif fault == "cut":
            path.write_bytes(data[: len(data) // 2])
        else:
            path.unlink()
    assert generate(two, prompt) == want
    assert two.last.tokens_by_tier.get("remote", 0) < WHOLE
    assert generate(two, prompt) == want
    close(two)


def test_remote_that_goes_away_costs_only_the_computing(
    smollm2: Any, smollm2_folder: Path, tmp_path: Path, prompt: list[int], want: list[int]
) -> None:
    one = engine(smollm2, smollm2_folder, tmp_path, "one")
    generate(one, prompt)
    close(one)
    two = engine(smollm2, smollm2_folder, tmp_path, "two")
    shutil.rmtree(tmp_path / "shared")
    (tmp_path / "shared").write_text("no folder any more")
    assert generate(two, prompt) == want
    assert generate(two, prompt) == want
    assert two.last.tokens_by_tier == {"dram": WHOLE}
    close(two)
