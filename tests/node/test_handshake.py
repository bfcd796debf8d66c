"""Who may attach to a node, to what, and what those are told who may not."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import threading
from pathlib import Path

import pytest
from node_process import attach, eventually
from node_thread import LIMIT_S, Raw, dram_store, serving

from kvist.core.errors import (
    ConfigError,
    NodeAwayError,
    NodeRefusedError,
    NodeRunningError,
    TierBusyError,
)
from kvist.node import attachment
from kvist.node import messages as m
from kvist.node import server as server_module
from kvist.node.client import NodeStore
from kvist.node.control import ask
from kvist.node.place import NodeLock, Place, default_socket, peer_uid
from kvist.store import TieredStore
from kvist.testing.store_suite import key, put


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "n.sock"


def test_another_user_is_refused_before_it_says_anything(path: Path) -> None:
    with serving(path, uid_of=lambda _: os.geteuid() + 1) as server, Raw(path) as raw:
        reply = raw.reply()
        assert isinstance(reply, m.Refused)
        assert "another user" in reply.reason
        assert raw.reply() is None
        assert server.refused_connections == 1


def test_node_of_another_user_is_not_believed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arena would decide what a prompt's KV is."""
    with serving(path):
        monkeypatch.setattr(attachment, "peer_uid", lambda _: os.geteuid() + 1)
        with pytest.raises(NodeRefusedError, match="another user listens"):
            NodeStore(path, attach(1))
        with pytest.raises(NodeRefusedError, match="another user listens"):
            ask(path, "status")


def test_the_kernel_says_who_connects_and_who_listens(path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert peer_uid(ours) == os.getuid()
    with serving(path), Raw(path) as raw:
        assert peer_uid(raw.link) == os.getuid()


def test_socket_and_folder_are_closed_to_others(folder: Path) -> None:
    path = folder / "new" / "n.sock"
    with serving(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_folder_that_others_can_enter_is_refused(folder: Path) -> None:
    (folder / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="open to other users"):
        Place(folder / "open" / "n.sock").make_folder()


def test_path_that_fits_in_no_address_is_refused_in_words(folder: Path) -> None:
    with pytest.raises(ConfigError, match="longer than"):
        Place(folder / ("x" * 120) / "n.sock").make_folder()


def test_socket_has_a_place_of_the_users_own(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert default_socket() == folder / "kvist" / "node.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "none"))
    assert str(os.getuid()) in str(default_socket())


def test_versions_that_share_no_protocol_are_told_both_ranges(path: Path) -> None:
    with serving(path), Raw(path) as raw:
        reply = raw.hello(oldest=7, newest=9)
        assert isinstance(reply, m.Refused)
        assert reply.for_good
        assert "7 to 9" in reply.reason
        assert raw.reply() is None


def test_newer_client_that_still_speaks_ours_is_welcome(path: Path) -> None:
    with serving(path), Raw(path) as raw:
        reply = raw.hello(oldest=1, newest=9)
        assert isinstance(reply, m.Welcome)
        assert reply.protocol == m.NEWEST_PROTOCOL


@pytest.mark.parametrize(
    "first", [b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 3) + b"\x91\x28\x00", b"\0\0\0\0"]
)
def test_what_is_no_greeting_ends_the_connection(path: Path, first: bytes) -> None:
    with serving(path), Raw(path) as raw:
        raw.link.sendall(first)
        assert isinstance(raw.reply(), m.Refused)
        assert raw.reply() is None


def test_first_message_cannot_be_long(path: Path) -> None:
    with serving(path), Raw(path) as raw:
        raw.link.sendall(struct.pack("<I", 1 << 20))
        reply = raw.reply()
        assert isinstance(reply, m.Refused)
        assert "at most" in reply.reason


def test_message_that_claims_to_be_huge_ends_the_connection(path: Path) -> None:
    with serving(path) as server, Raw(path) as raw:
        assert isinstance(raw.hello(), m.Welcome)
        raw.link.sendall(struct.pack("<I", 0xFFFFFFFF) + b"x" * 1000)
        assert isinstance(raw.reply(), m.Refused)
        assert raw.reply() is None
        (keyspace,) = server.keyspaces
        raw.close()
        eventually(lambda: not keyspace.sessions)


def test_connection_that_says_nothing_is_closed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "FIRST_S", 0.05)
    with serving(path), Raw(path) as raw:
        assert raw.reply() is None


def test_more_clients_than_a_node_serves_are_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MOST_CLIENTS", 1)
    with serving(path), Raw(path) as first:
        assert isinstance(first.hello(), m.Welcome)
        with Raw(path) as second:
            assert isinstance(second.reply(), m.Refused)


def test_engines_that_disagree_about_a_block_are_told_how(path: Path) -> None:
    with serving(path), NodeStore(path, attach(1)):
        with pytest.raises(NodeRefusedError, match=r"1000 bytes.*500"):
            NodeStore(path, attach(1, block_bytes=500), clock=Later())
        with pytest.raises(NodeRefusedError, match="another shape"):
            NodeStore(path, attach(1, layout="another shape"), clock=Later())


class Later:
    """A clock that runs fast: no patience."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += 10.0
        return self._now_s


def test_keyspaces_in_use_are_no_more_than_allowed(path: Path) -> None:
    with serving(path, keyspaces=2), NodeStore(path, attach(1)) as one, NodeStore(path, attach(2)):
        with pytest.raises(NodeRefusedError, match="all are in use"):
            NodeStore(path, attach(3), clock=Later())
        one.close()
        with NodeStore(path, attach(3)) as three:  # the idle one has given way
            assert all(put(three, range(3)))


def test_keyspaces_share_no_block(path: Path) -> None:
    with (
        serving(path, keyspaces=2),
        NodeStore(path, attach(1)) as a,
        NodeStore(path, attach(2)) as b,
    ):
        assert all(put(a, range(3)))
        assert (len(a.match([key(0)])), len(b.match([key(0)]))) == (1, 0)
        a.clear()
        assert len(a.match([key(0)])) == 0


def test_engines_that_come_while_a_store_opens_wait_for_it(path: Path) -> None:
    opened = threading.Event()
    opens: list[int] = []

    def slowly(*wanted: object) -> TieredStore:
        opens.append(1)
        assert opened.wait(LIMIT_S)
        return dram_store(*wanted)  # type: ignore[arg-type]

    with serving(path, slowly):
        found: list[NodeStore] = []
        threads = [
            threading.Thread(target=lambda: found.append(NodeStore(path, attach(1))))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        eventually(lambda: opens)
        assert ask(path, "status")["keyspaces"] == []  # others are served meanwhile
        opened.set()
        for thread in threads:
            thread.join(LIMIT_S)
        assert len(found) == 3
        assert opens == [1]
        for store in found:
            store.close()


def test_store_that_cannot_be_opened_is_refused_with_its_reason(path: Path) -> None:
    def fails(*wanted: object) -> TieredStore:
        raise TierBusyError(11, "the folder is in use by process 42")

    with serving(path, fails), pytest.raises(NodeRefusedError, match="process 42"):
        NodeStore(path, attach(1), clock=Later())


def test_two_nodes_cannot_serve_one_socket(path: Path) -> None:
    lock = NodeLock(Place(path))
    with pytest.raises(NodeRunningError, match=str(os.getpid())):
        NodeLock(Place(path))
    lock.release()
    NodeLock(Place(path)).release()


def test_no_node_is_said_in_one_line(path: Path) -> None:
    with pytest.raises(NodeAwayError, match=r"no node listens.*start one with `kvist node`"):
        NodeStore(path, attach(1))
    with pytest.raises(NodeAwayError, match="no node listens"):
        ask(path, "status")


def test_node_without_descriptors_refuses_and_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_pipe(flags: int) -> tuple[int, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    with serving(path):
        with Raw(path) as raw, monkeypatch.context() as patch:
            patch.setattr(os, "pipe2", no_pipe)
            reply = raw.hello()
            assert isinstance(reply, m.Refused)
            assert "Too many open files" in reply.reason
        with NodeStore(path, attach(1)) as store:
            assert all(put(store, range(2)))


def test_store_that_fails_to_open_in_any_way_is_refused(path: Path) -> None:
    """Three times: a thread that died of it would be missed by the third."""

    def fails(*wanted: object) -> TieredStore:
        raise ValueError("no slot fits")

    with serving(path, fails):
        for _ in range(3):
            with pytest.raises(NodeRefusedError, match="no slot fits"):
                NodeStore(path, attach(1), clock=Later())


def test_unknown_question_is_refused(path: Path) -> None:
    with serving(path), pytest.raises(NodeRefusedError, match="nothing to ask"):
        ask(path, "eval")
