"""`kvist cache` against a node in a process of its own: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from node_process import NodeProcess, clean_env

from kvist.cli.main import main
from kvist.core.keys import RequestScope, seed_bytes
from kvist.core.layout import BlockLayout
from kvist.core.outcome import BlockRef
from kvist.native import chain_keys, digest
from kvist.node.client import NodeStore
from kvist.node.keyspaces import Attach
from kvist.testing.store_suite import WAIT_S

LAYOUT = BlockLayout(layers=1, kv_heads=1, head_dim=8, block_tokens=16, dtype="float16")
WANTED = Attach(bytes([7] * 32), msgspec.json.encode(LAYOUT).decode(), LAYOUT.block_bytes)
PROMPT = list(range(100))  # six blocks and four tokens
Run = Callable[..., tuple[int, str, str]]


def names(salt: str = "") -> list[bytes]:
    seed = digest(seed_bytes(WANTED.fingerprint, RequestScope(salt=salt)))
    return chain_keys(seed, PROMPT, LAYOUT.block_tokens)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    folder = tmp_path_factory.mktemp("n")
    folder.chmod(0o700)
    with NodeProcess(folder / "n.sock", slots=32, ssd=folder / "ssd") as process:
        yield process
        process.assert_sound()


@pytest.fixture
def engine(node: NodeProcess) -> Iterator[NodeStore]:
    """An engine with two prompts of the same tokens, one of them under tenant b's salt."""
    with NodeStore(node.path, WANTED) as store:
        store.clear()
        for salt in ("", "b"):
            keys = names(salt)
            blocks = [BlockRef(key, keys[i - 1] if i else None, salt) for i, key in enumerate(keys)]
            with store.write(blocks) as lease:
                for i in range(len(blocks)):
                    lease.buffer(i)[:] = bytes(LAYOUT.block_bytes)
                    assert lease.commit(i)
        assert store.flush(WAIT_S)
        yield store


@pytest.fixture
def run(
    node: NodeProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    for name in set(os.environ) - set(clean_env()):
        monkeypatch.delenv(name)
    monkeypatch.chdir(node.path.parent)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["cache", *words, "--socket", str(node.path)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def changed(out: str) -> tuple[int, int, int]:
    found = json.loads(out)
    return found["changed"], found["present"], found["left"]


def test_ls_shows_a_run_of_each_prompt_in_each_tier(run: Run, engine: NodeStore) -> None:
    code, out, _ = run("ls")
    rows = [line.split() for line in out.splitlines()[1:]]
    assert code == 0
    assert {(r[0], r[1], r[4], r[5]) for r in rows} == {
        (names(salt)[-1].hex()[:12], "6", tier, salt or "''")
        for salt in ("", "b")
        for tier in ("dram", "ssd")
    }
    _, out, _ = run("ls", "--tenant", "b", "--tier", "dram", "--json")
    (row,) = [json.loads(line) for line in out.splitlines()]
    assert (row["first"], row["last"]) == (names("b")[0].hex(), names("b")[-1].hex())


def test_ls_of_a_key_shows_its_prefix_block_by_block(run: Run, engine: NodeStore) -> None:
    _, out, _ = run("ls", names()[2].hex()[:12], "--tier", "dram", "--json")
    assert [json.loads(line)["key"] for line in out.splitlines()] == [k.hex() for k in names()[:3]]
    code, out, err = run("ls", "--blocks", "--limit", "5")
    assert (code, len(out.splitlines())) == (0, 6)
    assert "--limit 0 shows all" in err
    assert len(run("ls", "--blocks", "--limit", "0")[1].splitlines()) == 25


def test_du_sums_up_by_tenant_and_tier(run: Run, engine: NodeStore) -> None:
    code, out, _ = run("du", "--json")
    (each,) = json.loads(out)
    assert code == 0
    assert {(u["tier"], u["tenant"], u["blocks"]) for u in each["usage"]} == {
        (tier, tenant, 6) for tenant in ("", "b") for tier in ("dram", "ssd")
    }
    assert "dram" in run("du")[1]


def test_a_prompt_is_named_by_its_tokens_and_salt(
    run: Run, engine: NodeStore, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(PROMPT))
    assert changed(run("pin", "--tokens", str(file), "--salt", "b", "--json")[1]) == (6, 0, 0)
    pinned = json.loads(run("du", "--tenant", "b", "--json")[1])[0]["usage"]
    assert {(u["tier"], u["pinned_blocks"]) for u in pinned} == {("dram", 6), ("ssd", 0)}
    code, _, err = run("evict", "--tokens", str(file), "--salt", "b")
    assert code == 1
    assert "6 blocks are leased, pinned" in err
    assert changed(run("unpin", "--all", "--json")[1]) == (6, 6, 0)
    assert changed(run("evict", "--tokens", str(file), "--salt", "b", "--json")[1]) == (6, 0, 0)
    assert len(engine.match(names("b"))) == 0
    assert len(engine.match(names())) == 6


def test_warm_moves_the_bytes_of_a_tenant_back_to_dram(run: Run, engine: NodeStore) -> None:
    code, out, _ = run("move", "--all", "--to", "ssd", "--json")
    assert (code, changed(out)) == (0, (12, 0, 0))
    assert {tier.value for tier in engine.match(names("b")).tiers} == {"ssd"}
    code, out, _ = run("warm", "--all", "--tenant", "b", "--json")
    assert (code, changed(out)) == (0, (6, 0, 0))
    assert {tier.value for tier in engine.match(names("b")).tiers} == {"dram"}
    assert {tier.value for tier in engine.match(names()).tiers} == {"ssd"}
    _, out, _ = run("ls", "--tenant", "b", "--tier", "dram", "--json")
    assert json.loads(out)["blocks"] == 6  # they still follow each other
    last = names()[-1].hex()[:10]
    assert changed(run("warm", last, "--alone", "--json")[1]) == (1, 0, 0)
    assert changed(run("warm", last, "--json")[1]) == (5, 1, 0)


def test_evict_all_of_a_tenant_leaves_the_others(run: Run, engine: NodeStore) -> None:
    assert changed(run("evict", "--all", "--tenant", "b", "--json")[1]) == (6, 0, 0)
    assert len(engine.match(names())) == 6
    assert len(engine.match(names("b"))) == 0


def test_clear_of_a_tenant_says_what_stays(run: Run, engine: NodeStore) -> None:
    """Pinned blocks stay: it said that all was well, or asked for ever while steps ran out."""
    assert run("pin", "--all", "--tenant", "b")[0] == 0
    code, out, err = run("clear", "--tenant", "b", "--yes")
    assert (code, out) == (1, "cleared 0 blocks\n")
    assert err == "kvist: 6 blocks are leased, pinned, moving or new, and stay\n"
    assert run("unpin", "--all", "--tenant", "b")[0] == 0
    assert run("clear", "--tenant", "b", "--yes")[:2] == (0, "cleared 6 blocks\n")


def test_clear_asks_first(run: Run, engine: NodeStore) -> None:
    code, _, err = _misused(run, "clear")
    assert "--yes" in err
    assert len(engine.match(names())) == 6
    assert run("clear", "--tenant", "b", "--yes", "--json")[:2] == (0, '{\n  "blocks": 6\n}\n')
    assert len(engine.match(names())) == 6
    code, out, _ = run("clear", "--yes")
    assert (code, out) == (0, "cleared 6 blocks\n")
    assert len(engine.match(names())) == 0


def _misused(run: Run, *words: str) -> tuple[int, str, str]:
    code, out, err = run(*words)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    return code, out, err


def test_misuse_is_one_line_that_names_the_thing(
    run: Run, engine: NodeStore, tmp_path: Path
) -> None:
    short = tmp_path / "short.json"
    short.write_text("[1, 2]")
    for words, named in (
        (("pin",), "--all"),
        (("pin", "abc", "--all"), "one way"),
        (("pin", "xyz"), "xyz"),
        (("pin", ""), "no key"),
        (("pin", "ffffffffff"), "ffffffffff"),
        (("evict", "--tokens", str(tmp_path / "none")), "none"),
        (("evict", "--tokens", str(short)), "do not fill a block of 16"),
        (("evict", "--text", str(short)), "--model"),
        (("ls", "--keyspace", "ff"), "no keyspace ff"),
        (("ls", "--limit", "-1"), "--limit"),
        (("du", "--keyspace", "ff"), "--keyspace"),
        (("warm", "--all", "--deadline", "0"), "--deadline"),
    ):
        assert named in _misused(run, *words)[2]


@pytest.mark.slow  # it imports Transformers
def test_a_prompt_is_named_by_its_text_and_the_models_tokenizer(
    run: Run, engine: NodeStore, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {f"w{n}": n for n in PROMPT} | {"?": 100}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(tmp_path / "m")
    file = tmp_path / "prompt.txt"
    file.write_text(" ".join(f"w{n}" for n in PROMPT))
    named = ("--text", str(file), "--model", str(tmp_path / "m"))
    assert changed(run("evict", *named, "--json")[1]) == (6, 0, 0)
    assert len(engine.match(names())) == 0
    assert len(engine.match(names("b"))) == 6


def test_a_node_that_is_away_is_a_failure_and_no_misuse(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "ls", "--socket", str(tmp_path / "none.sock")]) == 1
    assert "no node listens" in capsys.readouterr().err
