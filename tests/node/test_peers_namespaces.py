"""Two nodes in two network namespaces, with a veth pair between them that can be taken down."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from node_process import NodeProcess
from peer_nodes import (
    BLOCK_BYTES,
    BLOCKS,
    TIMEOUT_S,
    client_of,
    fill,
    key,
    learn,
    no_lease_left,
    read,
)

from kvist.core.outcome import Tier

NUMBERS = range(BLOCKS)
PORT = 7077
LATE_S = 4 * TIMEOUT_S


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, timeout=30)


@dataclass(frozen=True, slots=True)
class Spaces:
    """Two namespaces; the owner's is 10.77.0.1, the reader's 10.77.0.2."""

    owner: str
    reader: str
    link: str

    def set_link(self, state: str) -> None:
        """`up` or `down`."""
        _ip("netns", "exec", self.owner, "ip", "link", "set", self.link, state)


@pytest.fixture
def spaces() -> Iterator[Spaces]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need the program ip, and root")
    tag = secrets.token_hex(3)
    made = Spaces(f"kvist-{tag}-a", f"kvist-{tag}-b", f"kv{tag}a")
    try:
        _ip("netns", "add", made.owner)
        _ip("netns", "add", made.reader)
        ends = made.link, f"kv{tag}b"
        _ip("link", "add", ends[0], "netns", made.owner, "type", "veth", "peer", "name", ends[1],
            "netns", made.reader)  # fmt: skip
        for n, (space, end) in enumerate(zip((made.owner, made.reader), ends, strict=True), 1):
            inside = ("netns", "exec", space, "ip")
            _ip(*inside, "addr", "add", f"10.77.0.{n}/24", "dev", end)
            _ip(*inside, "link", "set", end, "up")
            _ip(*inside, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        _remove(made)
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield made
    _remove(made)


def _remove(made: Spaces) -> None:
    for space in (made.owner, made.reader):
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True, timeout=30)


def _node(path: Path, space: str, token: Path, *knobs: str) -> NodeProcess:
    sets = [
        f"store.dram.capacity={2 * BLOCKS * BLOCK_BYTES}",
        "store.ssd.enabled=false",
        f"node.peers.token_file={token}",
        f"node.peers.timeout_s={TIMEOUT_S}",
        "node.peers.probe_s=1",
        "node.peers.retry_s=0.1",
        *knobs,
    ]
    command = ("ip", "netns", "exec", space, sys.executable, "-m", "kvist.cli.main", "node")
    return NodeProcess(path, command=(*command, *(f"--set={text}" for text in sets), "--socket"))


def test_hosts_share_blocks_and_a_link_that_goes_down_is_a_miss(
    folder: Path, spaces: Spaces
) -> None:
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    with (
        _node(
            folder / "a.sock", spaces.owner, token, f"node.peers.listen=10.77.0.1:{PORT}"
        ) as owner,
        _node(
            folder / "b.sock", spaces.reader, token, f"node.peers.members=10.77.0.1:{PORT}"
        ) as reader,
        client_of(owner) as writer,
        client_of(reader) as engine,
    ):
        fill(writer, NUMBERS)
        learn(engine, NUMBERS)
        assert set(engine.match([key(0)]).tiers) == {Tier.PEER}
        assert read(engine, NUMBERS[: BLOCKS // 2]) == [True] * (BLOCKS // 2)
        spaces.set_link("down")
        assert read(engine, NUMBERS, LATE_S).count(False) == BLOCKS // 2
        no_lease_left(owner, reader)
        spaces.set_link("up")
        learn(engine, NUMBERS)
        assert read(engine, NUMBERS) == [True] * BLOCKS
        no_lease_left(owner, reader)
