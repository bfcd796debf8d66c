"""Every discovery passes the published suite (Redis in tests/services)."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvist.cluster.discovery.files import FileDiscovery
from kvist.cluster.discovery.memory import Board, MemoryDiscovery
from kvist.cluster.discovery.protocol import Discovery
from kvist.cluster.discovery.static import StaticDiscovery
from kvist.cluster.record import NodeState
from kvist.core.errors import ConfigError, TierError
from kvist.testing.discovery_suite import LONG_S, DiscoverySuite, suite_record


class _Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class _OwnTime:
    @pytest.fixture(autouse=True)
    def _medium(self) -> None:
        self.clock = _Clock()
        self.board = Board()

    def let_pass(self, seconds: float) -> None:
        self.clock.now_s += seconds


class TestMemoryDiscovery(_OwnTime, DiscoverySuite):
    def open_discovery(self, directory: Path) -> Discovery:
        return MemoryDiscovery(self.board, self.clock)


class TestFileDiscovery(_OwnTime, DiscoverySuite):
    def open_discovery(self, directory: Path) -> FileDiscovery:
        return FileDiscovery(directory / "nodes", self.clock)

    def test_damaged_files_are_left_out_and_counted(self, tmp_path: Path) -> None:
        discovery = self.open_discovery(tmp_path)
        discovery.announce(suite_record("a"), ttl_s=LONG_S)
        whole = (tmp_path / "nodes" / "a.json").read_bytes()
        (tmp_path / "nodes" / "cut.json").write_bytes(whole[: len(whole) // 2])
        (tmp_path / "nodes" / "other-name.json").write_bytes(whole)
        (tmp_path / "nodes" / "text.json").write_text("hello")
        (tmp_path / "nodes" / ".a.123").write_text("half")
        assert discovery.members() == [suite_record("a")]
        assert discovery.unreadable == 2

    def test_record_long_void_is_removed_by_whoever_announces(self, tmp_path: Path) -> None:
        discovery = self.open_discovery(tmp_path)
        discovery.announce(suite_record("dead"), ttl_s=1.0)
        discovery.members()
        self.let_pass(5.0)
        discovery.announce(suite_record("a"), ttl_s=LONG_S)
        assert (tmp_path / "nodes" / "dead.json").exists()
        self.let_pass(6.0)
        discovery.announce(suite_record("a"), ttl_s=LONG_S)
        assert sorted(p.name for p in (tmp_path / "nodes").iterdir()) == ["a.json"]

    def test_folder_that_cannot_be_used_is_a_tier_error(self, tmp_path: Path) -> None:
        (tmp_path / "nodes").write_text("a file")
        with pytest.raises(TierError):
            self.open_discovery(tmp_path)

    def test_folder_and_files_are_for_their_user_only(self, tmp_path: Path) -> None:
        discovery = self.open_discovery(tmp_path)
        discovery.announce(suite_record("a"), ttl_s=LONG_S)
        assert (tmp_path / "nodes").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "nodes" / "a.json").stat().st_mode & 0o777 == 0o600


def test_static_list_gives_addresses_and_announces_nothing() -> None:
    discovery = StaticDiscovery(
        ["b=tcp://h2:5557", "a=tcp://h1:5557?replay=tcp://h1:5558&domain=rack-1"]
    )
    discovery.announce(suite_record("c"), ttl_s=LONG_S)
    discovery.withdraw("a")
    a, b = discovery.members()
    assert (a.node, a.events, a.replay, a.domain) == (
        "a",
        "tcp://h1:5557",
        "tcp://h1:5558",
        "rack-1",
    )
    assert (b.node, b.incarnation, b.state, b.weight) == ("b", 0, NodeState.ACTIVE, 0)
    discovery.close()


@pytest.mark.parametrize(
    "entries",
    [
        ["tcp://h:1"],
        ["a=h:1"],
        ["a=http://h:1"],
        ["a=tcp://h:1?what=x"],
        ["a b=tcp://h:1"],
        ["a=tcp://h:1", "a=tcp://h:2"],
        ["a=tcp://[::1"],
    ],
    ids=["no name", "no scheme", "scheme", "option", "bad name", "twice", "no address"],
)
def test_static_entry_that_names_no_publisher_is_refused(entries: list[str]) -> None:
    with pytest.raises(ConfigError):
        StaticDiscovery(entries)


def test_ray_has_the_client_that_its_discovery_uses() -> None:
    """It is not public (docs/ray.md): that a Ray has changed it must not come out in service."""
    client = pytest.importorskip("ray._raylet").InnerGcsClient  # `GcsClient` passes calls to it
    calls = ("put", "del", "keys", "multi_get")
    assert [c for c in calls if not hasattr(client, f"internal_kv_{c}")] == []
