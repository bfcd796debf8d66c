"""The comparison at equal KL: LMCache's format by hand, curves read right, a run on the model."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from kvist.bench.codec.cachegen_peers import Equal, PeersResult, Row, at_equal_kl, main, show
from kvist.bench.codec.lmcache_format import lmcache_cachegen
from kvist.bench.codec.tables import spread_contexts
from kvist.core.errors import ConfigError


def row(name: str, bits: float, kl: float) -> Row:
    return Row(name=name, bits=bits, kl=kl, kl_p95=kl, k_error=0.1, v_error=0.1)


def test_bits_at_equal_kl_lie_between_the_levels() -> None:
    curve = [row("a", 4.0, 1e-4), row("b", 3.0, 1e-3), row("c", 2.0, 1e-2)]
    peers = [row("x", 7.0, 1e-3), row("y", 7.0, 10**-3.5), row("far", 1.0, 1.0), row("same", 1, 0)]
    found = {e.peer: e for e in at_equal_kl(peers, curve)}
    assert set(found) == {"x", "y"}
    assert found["x"].cachegen_bits == pytest.approx(3.0)
    assert found["y"].cachegen_bits == pytest.approx(3.5)
    assert found["y"].times_smaller == pytest.approx(2.0)


def test_lmcaches_format_rounds_each_token_by_its_largest() -> None:
    rng = np.random.default_rng(1)
    kv = rng.standard_normal((12, 2, 2, 40, 8)).astype(np.float32)
    kv[3, 1, :, 5] = 0
    coded = lmcache_cachegen(kv, chunk_tokens=16)
    largest = np.abs(kv).max(axis=(2, 4), keepdims=True)
    error = np.abs(coded.kv - kv) / np.where(largest > 0, largest, 1)
    assert error[:10, 0].max() <= 0.5 / 15 + 1e-6
    assert error[:2, 1].max() <= 0.5 / 15 + 1e-6
    assert error[10:, 0].max() > 0.5 / 15
    assert error[2:, 1].max() > 0.5 / 15
    assert error.max() <= 0.5 / 7 + 1e-6


def test_lmcaches_format_takes_what_its_parts_take() -> None:
    """One value only: no bits for symbols but the coder's end; distributions, lengths, scales."""
    kv = np.ones((1, 2, 1, 256, 4), np.float32)
    per_channel = 1 + 2 * (32 + 1) + 4
    size = lmcache_cachegen(kv).stored_bytes
    assert abs(size - 2 * (4 * per_channel + 256 * 2)) <= 2 * 4


def test_contexts_are_spread_over_a_text() -> None:
    found = spread_contexts(range(10_000), 4)
    assert [part[0] for part in found] == [0, 3120, 6240, 9360]
    assert {len(part) for part in found} == {640}
    assert [len(part) for part in spread_contexts(range(300), 12)] == [300]
    with pytest.raises(ConfigError, match="too short"):
        spread_contexts(range(50), 12)


def test_a_result_is_shown_and_survives_json() -> None:
    equal = Equal(peer="int8", kl=1e-4, peer_bits=8.0, cachegen_bits=5.0, times_smaller=1.6)
    found = PeersResult(model="none", contexts=1, rows=[row("int8", 8, 1e-4)], equal=[equal])
    screen = io.StringIO()
    show(found, Console(file=screen, width=120))
    assert "1.60×" in screen.getvalue()
    assert msgspec.json.decode(msgspec.json.encode(found), type=PeersResult) == found


def test_a_text_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--texts", str(Path("/nonexistent"))]) == 2
    assert "No such file" in capsys.readouterr().err
