"""From a URL to an adapter: what is refused, with which words, and that nothing is connected to."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvist.adapters.late import LateAdapter
from kvist.adapters.layers import Operation
from kvist.adapters.memory import MemoryAdapter
from kvist.adapters.opening import Limits, check_url, open_layered
from kvist.adapters.protocol import StorageAdapter
from kvist.assemble import open_embedded_store
from kvist.cli.main import main
from kvist.config import (
    Config,
    load_config,
    preflight,
    remote_answers,
    without_password,
)
from kvist.core.errors import ClosedError, ConfigError, TierError, UnsupportedError, VersionError
from kvist.core.outcome import BlockRef, Outcome, Tier
from kvist.native import digest
from kvist.testing.adapter_suite import fetch, new_object, probe, suite_object

BLOCK_BYTES = 10_000
WAIT_S = 20.0


def config_for(url: str, tmp_path: Path, *, ssd: bool = True, **remote: object) -> Config:
    return load_config(
        env={},
        overrides={
            "store": {
                "dram": {"capacity": "16MiB", "restore": 0.0},
                "ssd": {"enabled": ssd, "path": str(tmp_path / "ssd"), "capacity": "64MiB"},
                "remote": {"url": url, "probe_s": 1.0, **remote},
            }
        },
    ).config


def test_opened_adapter_works_and_counts(tmp_path: Path) -> None:
    opened = open_layered(f"file://{tmp_path}/a%20b", Limits(timeout_s=20.0, bytes_per_s=1e9))
    opened.adapter.put([new_object(1)])
    assert fetch(opened.adapter, 1) == suite_object(1)
    assert (tmp_path / "a b" / "objects").is_dir()
    assert opened.counts.counts()[Operation.PUT].calls == 1
    assert opened.breaker.passes()
    opened.adapter.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "nothing is no kind of remote; begin with file://"),
        ("ftp://host/a", "ftp is no kind of remote"),
        ("file:///", "names no folder"),
        ("file://host/a", "names no folder"),
        ("file:///a?b=1", "file has no option b"),
        ("s3:///a", "names no bucket"),
        ("s3://bucket?zone=1", "s3 has no option zone; it has endpoint, region"),
        ("redis://host:port", "Port"),
        ("redis://[::1", "Invalid IPv6 URL; see docs/remote.md"),
    ],
)
def test_urls_that_cannot_be_used_are_refused_in_one_line(url: str, words: str) -> None:
    if url.startswith(("s3", "redis")):
        pytest.importorskip("redis")
        pytest.importorskip("obstore")
    with pytest.raises(ConfigError, match=r"\$\.store\.remote\.url: ") as caught:
        check_url(url)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "library", "extra"),
    [
        ("redis://h:1/0", "redis", "redis"),
        ("s3://b/p", "obstore", "s3"),
        ("mooncake://h:1?metadata=http://h:2/m", "mooncake.store", "mooncake"),
    ],
)
def test_library_that_is_missing_is_named_with_its_extra(
    url: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UnsupportedError) as caught:
        check_url(url)
    assert f"needs {library}" in str(caught.value)
    assert f"pip install 'kvist[{extra}]'" in str(caught.value)


def test_importing_kvist_imports_no_foreign_client() -> None:
    code = (
        "import sys, kvist, kvist.cli.main, kvist.assemble, kvist.adapters.opening;"
        "print([m for m in ('redis', 'obstore', 'mooncake') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_capacity_that_a_medium_cannot_keep_is_refused() -> None:
    pytest.importorskip("redis")
    with pytest.raises(ConfigError, match="cluster"):
        open_layered("redis+cluster://h:1", Limits(capacity_bytes=1 << 30))


def test_medium_that_is_down_is_opened_later() -> None:
    failures: list[Exception] = [TierError(5, "down"), VersionError("newer")]

    def opener() -> StorageAdapter:
        if failures:
            raise failures.pop(0)
        return MemoryAdapter()

    late = LateAdapter(opener, name="somewhere")
    with pytest.raises(TierError, match="down"):
        probe(late, [1])
    with pytest.raises(TierError, match="newer"):
        probe(late, [1])
    late.put([new_object(1)])
    assert probe(late, [1]) == [True]
    late.close()
    with pytest.raises(ClosedError):
        probe(late, [1])


def test_preflight_names_the_url_and_the_check_asks_for_an_answer(tmp_path: Path) -> None:
    assert preflight(config_for(f"file://{tmp_path}/r", tmp_path)) == []
    assert not (tmp_path / "r").exists()
    (problem,) = preflight(config_for("ftp://x", tmp_path))
    assert problem.path == "store.remote.url"
    assert "no kind of remote" in problem.message
    assert remote_answers(config_for(f"file://{tmp_path}/r", tmp_path)) is None
    (tmp_path / "file").write_text("no folder")
    silent = remote_answers(config_for(f"file://{tmp_path}/file", tmp_path))
    assert silent is not None
    assert "does not answer" in silent.message


def test_config_check_shows_the_remote_and_hides_its_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [f"store.ssd.path={tmp_path}/ssd", "store.dram.capacity=16MiB"]
    sets += ["store.ssd.capacity=64MiB"]
    options = [word for text in sets for word in ("--set", text)]
    url = f"file://{tmp_path}/r"
    assert main(["config", "check", *options, "--set", f"store.remote.url={url}"]) == 0
    assert f"remote {url}" in capsys.readouterr().out
    assert main(["config", "check", *options]) == 0
    assert "remote off" in capsys.readouterr().out
    hidden = ["--set", "store.remote.url=redis://me:hush@127.0.0.1:1/0"]
    for form in ([], ["--json"]):
        assert main(["config", "show", *form, *options, *hidden]) == 0
        shown = capsys.readouterr().out
        assert "hush" not in shown
        assert "me:***@" in shown
    if pytest.importorskip("redis"):
        assert main(["config", "check", *options, *hidden]) == 1
        assert "hush" not in capsys.readouterr().out


def test_only_the_password_of_a_url_is_hidden() -> None:
    assert without_password("redis://:pw@h:1/0") == "redis://:***@h:1/0"
    assert without_password("rediss://me:p%40w@h/0?a=b") == "rediss://me:***@h/0?a=b"
    for plain in ("redis://h:1/0", "s3://b/p?endpoint=http://h:1", "/a:b@c", "s3://b/a:b@c"):
        assert without_password(plain) == plain


def test_store_starts_and_works_while_the_remote_is_down(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    config = config_for(f"file://{tmp_path}/file", tmp_path, retries=0)
    store = open_embedded_store(config, block_bytes=BLOCK_BYTES, fingerprint=bytes(32))
    key = digest(b"one")
    with store.write([BlockRef(key, None)]) as lease:
        lease.buffer(0)[:] = bytes(BLOCK_BYTES)
        assert lease.commit(0)
    assert store.flush(WAIT_S)
    assert store.match([key]).tiers == (Tier.DRAM,)
    store.close()
    again = open_embedded_store(config, block_bytes=BLOCK_BYTES, fingerprint=bytes(32))
    assert again.match([key]).tiers == (Tier.SSD,)
    with again.read([key], deadline_s=WAIT_S) as lease:
        assert lease.wait(0) is Outcome.HIT
    again.close()


@pytest.mark.parametrize("ssd", [True, False])
def test_metrics_of_the_remote_reach_the_store(tmp_path: Path, *, ssd: bool) -> None:
    config = config_for(f"file://{tmp_path}/r", tmp_path, ssd=ssd, timeout_s=20.0)
    store = open_embedded_store(config, block_bytes=BLOCK_BYTES, fingerprint=bytes(32))
    key = digest(b"one")
    give_up_s = time.monotonic() + WAIT_S
    while store.samples()["kvist_remote_calls_total.get"] < 1.0:
        assert len(store.match([key])) == 0
        assert time.monotonic() < give_up_s
    samples = store.samples()
    assert samples["kvist_remote_resting"] == 0.0
    assert ("kvist_remote_waiting_bytes" in samples) == ssd
    store.close()
