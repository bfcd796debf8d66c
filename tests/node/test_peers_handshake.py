"""Who may read from a node, and what the others are told."""

from __future__ import annotations

import logging
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from node_process import attach, clean_env
from peer_thread import LIMIT_S, RawPeer, hello_of, owner, peering, until

from kvist.assemble import node_peering
from kvist.config import load_config, preflight
from kvist.core.errors import ConfigError, NodeRefusedError
from kvist.core.outcome import Outcome
from kvist.native.answer import BLOCK, MISS
from kvist.node.peers import messages as m
from kvist.node.peers import server as server_module
from kvist.node.peers.credentials import Credentials, read_token, tls_contexts
from kvist.node.peers.handshake import greet
from kvist.node.peers.tier import PeerTier
from kvist.node.peers.wire import connect
from kvist.testing.store_suite import RAW_BYTES, content, key

TOKEN = Credentials(b"t" * 32)
OTHER = Credentials(b"u" * 32)
KEYS = [key(n) for n in range(4)]


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (TOKEN, OTHER, "the token is not this node's"),
        (TOKEN, Credentials(), "demands a token"),
        (Credentials(), TOKEN, "does not ask for the token"),
    ],
)
def test_wrong_token_is_refused_in_words_on_both_sides(
    ours: Credentials, theirs: Credentials, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with owner(ours) as (server, _):
        lender = peering(server, theirs).lender(attach(1))
        assert lender is not None
        assert lender.contains_run(KEYS) == 0
        until(lambda: said in caplog.text)
        if theirs.token and ours.token:
            until(lambda: f"is refused: {said}" in caplog.text)
            assert server.refused["refused"] >= 1
        lender.close()


def test_right_token_gives_the_blocks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with owner(TOKEN) as (server, _):
        lender = peering(server, TOKEN).lender(attach(1))
        assert lender is not None
        until(lambda: lender.contains_run([*KEYS, key(9)]) == 4)
        outs = [bytearray(RAW_BYTES) for _ in KEYS]
        outcomes = dict(lender.read_many(list(zip(KEYS, map(memoryview, outs), strict=True))))
        assert set(outcomes.values()) == {Outcome.HIT}
        assert [bytes(o) for o in outs] == [content(k) for k in KEYS]
        lender.close()
    assert TOKEN.token.decode() not in caplog.text
    assert TOKEN.token.decode() not in repr(TOKEN)


def test_token_never_crosses_the_wire_and_an_owner_without_it_is_refused() -> None:
    """An impostor takes every message of a reader and cannot answer the proof."""
    heard = b""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        impostor.settimeout(LIMIT_S)

        def play() -> None:
            nonlocal heard
            link, _ = impostor.accept()
            with link:
                link.settimeout(LIMIT_S)
                heard += link.recv(4096)
                link.sendall(m.encode(m.Challenge(2, b"o" * 16, b"y" * 32, True)))
                heard += (proof := link.recv(4096))
                link.sendall(proof)  # sent back as if it were ours
                heard += link.recv(4096)

        actor = threading.Thread(target=play)
        actor.start()
        with owner(TOKEN) as (server, _):
            real = peering(server, TOKEN)
        host, port = impostor.getsockname()
        wire = connect(host, port, None, time.monotonic() + LIMIT_S)
        with pytest.raises(NodeRefusedError, match="does not know the token"):
            greet(wire, TOKEN, real.node, attach(1), time.monotonic() + LIMIT_S)
        wire.close()
        actor.join(LIMIT_S)
    assert heard
    assert TOKEN.token not in heard


def test_proof_of_an_earlier_conversation_is_worth_nothing() -> None:
    with owner(TOKEN) as (server, _):
        with RawPeer(server) as first:
            hello = first.say(hello_of())
            proof = m.Proof(TOKEN.proof_of_reader(hello, first.hear() or b""))
            first.say(proof)
            assert isinstance(first.answer(), m.Proof)
        with RawPeer(server) as second:
            second.say(hello_of())
            assert isinstance(second.answer(), m.Challenge)
            second.say(proof)
            assert isinstance(second.answer(), m.Refused)


def test_versions_that_share_nothing_refuse_each_other_in_words() -> None:
    with owner() as (server, _), RawPeer(server) as raw:
        answer = raw.greet(oldest=7, newest=9)
        assert isinstance(answer, m.Refused)
        assert answer.reason.startswith("this node speaks peer protocols 2 to 3, the other 7 to 9")


@pytest.mark.parametrize("other", [{"block_bytes": RAW_BYTES + 1}, {"layout": "another"}])
def test_other_layout_of_the_same_keyspace_is_refused_in_words(other: dict[str, object]) -> None:
    with owner() as (server, _), RawPeer(server) as raw:
        answer = raw.greet(**other)
        assert isinstance(answer, m.Refused)
        assert "blocks of keyspace" in answer.reason


def test_keyspace_that_is_not_in_use_has_no_blocks() -> None:
    with owner() as (server, _), RawPeer(server) as raw:
        assert raw.greet(fingerprint=key(2)) == m.Welcome(False)
        raw.say(m.Have(b"".join(KEYS)))
        assert raw.hear() == m.encode(m.Held(b"\0"))
        raw.say(m.Read(b"".join(KEYS), 1.0))
        headers = [BLOCK.unpack(raw.take(BLOCK.size) or b"") for _ in KEYS]
        assert sorted(headers) == [(n, MISS, 0, 0, key(n)) for n in range(4)]


def test_request_before_the_proof_is_refused() -> None:
    with owner(TOKEN) as (server, _), RawPeer(server) as raw:
        raw.say(hello_of())
        assert isinstance(raw.answer(), m.Challenge)
        raw.say(m.Read(key(0), 1.0))
        assert isinstance(raw.answer(), m.Refused)
        assert raw.hear() is None


def test_strangers_are_bounded_in_number_time_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_STRANGERS", 3)
    with owner(TOKEN, first_s=0.5) as (server, _):
        silent = [RawPeer(server) for _ in range(6)]
        until(lambda: server.refused["crowded"] == 3)
        for raw in silent:
            assert raw.hear() is None  # in the end, all are let go
            raw.close()
        with RawPeer(server) as raw:
            raw.send(m.HEAD.pack(m.MOST_STRANGER_BYTES + 1))
            assert isinstance(raw.answer(), m.Refused)
        with RawPeer(server) as dripping:
            assert _is_cut_off(dripping, m.encode(hello_of()))
        with RawPeer(server) as raw:
            assert isinstance(raw.greet(TOKEN), m.Welcome)


def _is_cut_off(raw: RawPeer, data: bytes) -> bool:
    """Whether the owner hangs up on one that sends a byte now and then, each in time."""
    try:
        for byte in data:
            raw.send(bytes([byte]))
            time.sleep(0.02)
        return raw.hear() is None
    except OSError:
        return True


def test_node_that_meets_itself_leaves_itself_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    node = b"s" * m.NODE_BYTES
    with owner(node=node) as (server, _):
        reader = peering(server)
        object.__setattr__(reader, "node", node)
        lender = reader.lender(attach(1))
        assert lender is not None
        assert lender.contains_run(KEYS) == 0
        until(lambda: "is this node itself" in caplog.text)
        assert lender.contains_run(KEYS) == 0
        assert caplog.text.count("is this node itself") == 1
        lender.close()


def _failures(lender: PeerTier) -> float:
    return sum(v for name, v in lender.samples().items() if "failures" in name)


def _openssl(folder: Path, *args: str) -> None:
    subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True, timeout=60)


def _certified(folder: Path, ca: str) -> None:
    """A CA and one certificate of it, for 127.0.0.1."""
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    _openssl(folder, "req", "-x509", *new, "-subj", f"/CN={ca}", "-keyout", f"{ca}.key", "-out", ca)
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    _openssl(
        folder, "req", *new[:-2], "-subj", "/CN=n", "-keyout", f"{ca}-n.key", "-out", f"{ca}.csr"
    )
    signed = ["-CA", ca, "-CAkey", f"{ca}.key", "-CAcreateserial", "-days", "2", "-extfile", "san"]
    _openssl(folder, "x509", "-req", "-in", f"{ca}.csr", *signed, "-out", f"{ca}-n")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates")
def test_tls_reads_blocks_and_refuses_certificates_of_another_ca(tmp_path: Path) -> None:
    for ca in ("ours", "theirs"):
        _certified(tmp_path, ca)
    sides = {
        (ca, trusted): Credentials(
            b"", *tls_contexts(tmp_path / f"{ca}-n", tmp_path / f"{ca}-n.key", tmp_path / trusted)
        )
        for ca, trusted in (("ours", "ours"), ("theirs", "ours"), ("ours", "theirs"))
    }
    with owner(sides["ours", "ours"]) as (server, _):
        lender = peering(server, sides["ours", "ours"]).lender(attach(1))
        assert lender is not None
        until(lambda: lender.contains_run(KEYS) == 4)
        out = bytearray(RAW_BYTES)
        assert lender.read_into(KEYS[1], memoryview(out)) is Outcome.HIT
        assert bytes(out) == content(KEYS[1])
        lender.close()
        for wrong in (sides["theirs", "ours"], sides["ours", "theirs"], Credentials()):
            lender = peering(server, wrong).lender(attach(1))
            assert lender is not None
            assert lender.contains_run(KEYS) == 0
            until(lambda lender=lender: _failures(lender) > 0)
            assert lender.contains_run(KEYS) == 0
            lender.close()


def test_token_file_must_be_private_and_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("x" * 64 + "\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="open to other users"):
        read_token(str(path), "k")
    path.chmod(0o600)
    assert read_token(str(path), "k") == b"x" * 64
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="32 are the least"):
        read_token(str(path), "k")
    with pytest.raises(ConfigError, match="cannot read"):
        read_token(str(tmp_path / "absent"), "k")


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (["listen=0.0.0.0:7077"], "would believe anybody there"),
        (["members=127.0.0.1:1,10.1.2.3:7077"], "would believe anybody there"),
        (["listen=nowhere"], "is not HOST:PORT"),
        (["listen=::1:7077"], "is not HOST:PORT"),
        (["listen=127.0.0.1:70777"], "is not HOST:PORT"),
        (["listen=127.0.0.1:7077", "tls_cert=x"], "TLS needs a certificate"),
        (["listen=0.0.0.0:7077", "token_file=/nonexistent"], "cannot read /nonexistent"),
    ],
)
def test_configuration_that_would_serve_unproven_is_refused(knobs: list[str], said: str) -> None:
    config = load_config(env={}, sets=[f"node.peers.{knob}" for knob in knobs]).config
    with pytest.raises(ConfigError, match=said) as caught:
        node_peering(config)
    assert caught.value.path.startswith("$.node.peers.")
    assert caught.value.remedy


def test_check_of_the_configuration_says_what_a_node_would() -> None:
    sets = ["node.peers.listen=0.0.0.0:7077", "store.ssd.enabled=false"]
    (problem,) = preflight(load_config(env={}, sets=sets).config)
    assert str(problem).startswith("$.node.peers.listen (default): 0.0.0.0:7077 is not of this")


@pytest.mark.parametrize(
    "knobs", [["listen=[::1]:7077"], ["members=localhost:7077, 127.0.0.2:1"], []]
)
def test_loopback_needs_no_credentials(knobs: list[str]) -> None:
    config = load_config(env={}, sets=[f"node.peers.{knob}" for knob in knobs]).config
    found = node_peering(config)
    assert [str(found.listen)] == (["[::1]:7077"] if "listen" in str(knobs) else ["None"])
    assert len(found.members) == (2 if "members" in str(knobs) else 0)


def test_node_that_would_serve_unproven_does_not_start(folder: Path) -> None:
    command = [sys.executable, "-m", "kvist.cli.main", "node", "--socket", str(folder / "n.sock")]
    done = subprocess.run(
        [*command, "--set=node.peers.listen=0.0.0.0:7077"],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_env(),
        check=False,
    )
    assert done.returncode == 2
    assert "would believe anybody there" in done.stderr
    assert done.stderr.count("\n") == 1
