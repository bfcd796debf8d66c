"""`DiscoverySuite`: what every discovery must do. Subclass it and define `open_discovery`."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from kvist.cluster.discovery.protocol import Discovery
from kvist.cluster.record import NodeRecord, NodeState, TierSpace

LONG_S = 600.0
THREAD_TIMEOUT_S = 60.0


def suite_record(node: str, version: int = 1) -> NodeRecord:
    """A record with something in every field."""
    return NodeRecord(
        node,
        incarnation=1_700_000_000_000_000_000,
        version=version,
        state=NodeState.ACTIVE,
        domain="row 2/rack é",
        events="tcp://10.0.0.1:5557",
        replay="tcp://10.0.0.1:5558",
        blocks="10.0.0.1:5559",
        weight=64,
        free_bytes=1 << 40,
        tiers=(TierSpace("dram", 1, 2), TierSpace("ssd", 3, 1 << 50)),
        group_blocks=32,
    )


class DiscoverySuite:
    """The contract of `Discovery`, one claim a test. The medium of a test is `directory`'s."""

    def open_discovery(self, directory: Path) -> Discovery:
        """A discovery over the medium of `directory`; several share it."""
        raise NotImplementedError

    def let_pass(self, seconds: float) -> None:
        """Makes that time pass for the medium and for all that were opened."""
        raise NotImplementedError

    def test_nobody_is_there_at_first(self, tmp_path: Path) -> None:
        discovery = self.open_discovery(tmp_path)
        assert discovery.members() == []
        discovery.close()

    def test_record_is_found_by_others_whole(self, tmp_path: Path) -> None:
        one, other = self.open_discovery(tmp_path), self.open_discovery(tmp_path)
        one.announce(suite_record("a"), ttl_s=LONG_S)
        assert other.members() == [suite_record("a")]
        assert one.members() == [suite_record("a")]
        one.close()
        other.close()

    def test_members_are_listed_by_name(self, tmp_path: Path) -> None:
        discovery = self.open_discovery(tmp_path)
        for node in ("c", "a", "b-1.example", "b_2"):
            discovery.announce(suite_record(node), ttl_s=LONG_S)
        names = [record.node for record in discovery.members()]
        assert names == ["a", "b-1.example", "b_2", "c"]
        discovery.close()

    def test_new_record_takes_the_place_of_the_former(self, tmp_path: Path) -> None:
        one, other = self.open_discovery(tmp_path), self.open_discovery(tmp_path)
        one.announce(suite_record("a", 1), ttl_s=LONG_S)
        assert other.members() == [suite_record("a", 1)]
        one.announce(suite_record("a", 2), ttl_s=LONG_S)
        assert other.members() == [suite_record("a", 2)]
        one.close()
        other.close()

    def test_withdrawn_record_is_gone_and_others_stay(self, tmp_path: Path) -> None:
        one, other = self.open_discovery(tmp_path), self.open_discovery(tmp_path)
        one.announce(suite_record("a"), ttl_s=LONG_S)
        one.announce(suite_record("b"), ttl_s=LONG_S)
        one.withdraw("a")
        one.withdraw("never-there")
        assert other.members() == [suite_record("b")]
        one.close()
        other.close()

    def test_record_that_is_not_renewed_vanishes(self, tmp_path: Path) -> None:
        one, other = self.open_discovery(tmp_path), self.open_discovery(tmp_path)
        one.announce(suite_record("short"), ttl_s=0.4)
        one.announce(suite_record("long"), ttl_s=LONG_S)
        assert [record.node for record in other.members()] == ["long", "short"]
        self.let_pass(0.8)
        assert [record.node for record in other.members()] == ["long"]
        one.close()
        other.close()

    def test_record_that_is_renewed_stays(self, tmp_path: Path) -> None:
        one, other = self.open_discovery(tmp_path), self.open_discovery(tmp_path)
        one.announce(suite_record("a", 1), ttl_s=0.4)
        other.members()
        self.let_pass(0.8)
        one.announce(suite_record("a", 2), ttl_s=LONG_S)
        self.let_pass(0.8)
        assert other.members() == [suite_record("a", 2)]
        one.close()
        other.close()

    def test_record_outlives_the_object_that_announced_it(self, tmp_path: Path) -> None:
        one = self.open_discovery(tmp_path)
        one.announce(suite_record("a"), ttl_s=LONG_S)
        one.close()
        other = self.open_discovery(tmp_path)
        assert other.members() == [suite_record("a")]
        other.close()

    def test_reader_never_sees_half_a_record(self, tmp_path: Path) -> None:
        one, other = self.open_discovery(tmp_path), self.open_discovery(tmp_path)
        rounds = 60
        one.announce(suite_record("a", 0), ttl_s=LONG_S)

        def write() -> None:
            for version in range(1, rounds):
                one.announce(suite_record("a", version), ttl_s=LONG_S)

        writer = threading.Thread(target=write)
        writer.start()
        seen = [other.members() for _ in range(rounds)]
        writer.join(THREAD_TIMEOUT_S)
        assert not writer.is_alive()
        for members in seen:
            (record,) = members
            assert record == msgspec.structs.replace(suite_record("a"), version=record.version)
        assert other.members() == [suite_record("a", rounds - 1)]
        one.close()
        other.close()
