"""One node gives way to the next: what is on SSD stays, engines follow by themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_process import START_S, NodeProcess, attach, clean_env, eventually

from kvist.assemble import open_store
from kvist.cli.serve_checks import check_machine
from kvist.config import load_config
from kvist.core.errors import ConfigError, NodeAwayError
from kvist.core.outcome import Tier
from kvist.node import control
from kvist.node.client import NodeStore
from kvist.node.place import NodeLock, Place
from kvist.testing.store_suite import WAIT_S, content, key, put

SSD = ("store.ssd.capacity=64MiB", "store.ssd.fsync=off", "store.dram.restore=0")


def cli(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvist.cli.main", *words],
        env=clean_env(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_next_node_serves_what_the_last_one_wrote_to_ssd(folder: Path) -> None:
    with NodeProcess(folder / "n.sock", ssd=folder / "ssd") as node, node.client() as store:
        assert all(put(store, range(4)))
        node.terminate()  # writes what is not on SSD yet
        eventually(lambda: not store.attached)
        assert "drained" in node.log_text()
        node.start_again()
        eventually(lambda: store.attached)
        match = store.match([key(n) for n in range(4)])
        assert match.tiers == (Tier.SSD,) * 4  # DRAM is new and empty
        with store.read([key(n) for n in range(4)], deadline_s=WAIT_S) as lease:
            assert all(lease.wait(i).value == "hit" for i in range(4))
            assert all(bytes(lease.buffer(i)) == content(key(i)) for i in range(4))


def test_node_is_replaced_while_an_engine_uses_it(folder: Path) -> None:
    """`kvist node --replace` ends the old one, waits for its folders and goes on."""
    with NodeProcess(folder / "n.sock", ssd=folder / "ssd") as old, old.client() as store:
        assert all(put(store, range(4)))
        replace = ("--replace",)
        with NodeProcess(folder / "n.sock", ssd=folder / "ssd", options=replace) as new:
            assert old.process.wait(START_S) == 0
            eventually(lambda: store.attachments == 2 and store.attached)
            assert len(store.match([key(n) for n in range(4)])) == 4
            new.assert_sound()


def test_second_node_says_that_one_runs(node: NodeProcess, folder: Path) -> None:
    done = cli("node", "--socket", str(node.path), folder=folder)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("kvist: error: a node serves")
    assert node.status()["pid"] == node.process.pid


def test_status_and_stop_are_what_they_say(folder: Path) -> None:
    with NodeProcess(folder / "n.sock") as node, node.client() as store:
        assert all(put(store, range(2)))
        done = cli("node", "status", "--socket", str(node.path), folder=folder)
        assert f"process {node.process.pid}" in done.stdout
        assert attach(1).fingerprint.hex()[:12] in done.stdout
        found = json.loads(
            cli("node", "status", "--json", "--socket", str(node.path), folder=folder).stdout
        )
        assert found["keyspaces"][0]["dram_blocks"] == 2
        assert cli("node", "stop", "--socket", str(node.path), folder=folder).returncode == 0
        assert node.process.wait(START_S) == 0
        done = cli("node", "status", "--socket", str(node.path), folder=folder)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert "no node listens" in done.stderr


@pytest.fixture
def auto_folder(folder: Path) -> Iterator[Path]:
    """A folder in which nodes may be started by themselves; they are ended."""
    yield folder
    try:
        pid = control.ask(folder / "n.sock", "status")["pid"]
    except NodeAwayError:
        return
    os.kill(pid, signal.SIGTERM)
    lock = NodeLock(Place(folder / "n.sock"), wait_s=START_S)
    lock.release()


def auto_store(folder: Path) -> NodeStore:
    sets = [f"node.socket={folder / 'n.sock'}", "store.where=auto", "store.dram.capacity=1MiB"]
    sets += [f"store.ssd.path={folder / 'ssd'}", *SSD]
    config = load_config(env={}, sets=sets).config
    wanted = attach(1)
    store = open_store(config, block_bytes=wanted.block_bytes, fingerprint=wanted.fingerprint)
    assert isinstance(store, NodeStore)
    return store


def test_engines_that_start_together_start_one_node(auto_folder: Path) -> None:
    stores: list[NodeStore] = []
    threads = [
        threading.Thread(target=lambda: stores.append(auto_store(auto_folder))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(stores) == 3
    assert all(put(stores[0], range(3)))
    assert [len(store.match([key(0)])) for store in stores] == [1, 1, 1]
    status = control.ask(auto_folder / "n.sock", "status")
    assert (status["clients"], status["keyspaces"][0]["capacity_blocks"]) == (3, 256)
    for store in stores:
        store.close()
    assert control.listens(auto_folder / "n.sock")  # it stays


def test_node_that_was_killed_is_started_again_by_who_needs_it(auto_folder: Path) -> None:
    with auto_store(auto_folder) as store:
        assert all(put(store, range(3)))
        assert store.flush(WAIT_S)
        os.kill(control.ask(auto_folder / "n.sock", "status")["pid"], signal.SIGKILL)
        eventually(lambda: store.attachments == 2, 60.0)
        assert len(store.match([key(n) for n in range(3)])) == 3  # from SSD


def test_store_of_a_node_that_does_not_run_is_refused(folder: Path) -> None:
    sets = [f"node.socket={folder / 'n.sock'}", "store.where=node"]
    with pytest.raises(NodeAwayError, match="kvist node"):
        open_store(load_config(env={}, sets=sets).config, block_bytes=1000, fingerprint=bytes(32))


def test_keyspaces_have_equal_parts_of_the_capacity(folder: Path) -> None:
    options = ("--set=node.keyspaces=2", "--set=store.ssd.capacity=128MiB")
    ssd = folder / "ssd"
    with (
        NodeProcess(folder / "n.sock", slots=16, ssd=ssd, options=options) as node,
        node.client(1) as a,
        node.client(2) as b,
    ):
        assert (a.room_blocks(), b.room_blocks()) == (8, 8)
        assert all(put(a, range(2)))
        assert a.flush(WAIT_S)
        assert len(list(ssd.glob("k-*"))) == 2


def test_serve_takes_a_node_that_owns_the_ssd_folder(folder: Path) -> None:
    """The folder is in use, by the very process that the engine is to attach to."""
    with NodeProcess(folder / "n.sock", ssd=folder / "ssd") as node, node.client():
        sets = [f"node.socket={node.path}", f"store.ssd.path={folder / 'ssd'}"]
        sets += ["store.ssd.capacity=64MiB", "store.dram.capacity=16MiB"]
        check_machine(load_config(env={}, sets=[*sets, "store.where=node"]))
        check_machine(load_config(env={}, sets=[*sets, "store.where=auto"]))
        with pytest.raises(ConfigError, match="in use by process"):
            check_machine(load_config(env={}, sets=sets))
