"""Membership: silence makes suspects, more of it buries, and only newer records bring back."""

from __future__ import annotations

import msgspec
import pytest
from small import record

from kvist.cluster.membership import MOST_MEMBERS, Change, Membership, Timings
from kvist.cluster.record import (
    NodeState,
    TierSpace,
    decode_record,
    encode_record,
    next_incarnation,
)
from kvist.core.errors import FormatError, VersionError

TIMES = Timings(beat_s=1.0, suspect_s=3.0, expire_s=8.0, forget_s=100.0)


def test_silence_makes_a_suspect_and_then_buries() -> None:
    members = Membership(TIMES)
    assert members.hear(record("a"), 0.0) is Change.JOINED
    assert members.tick(2.9) == []
    assert members.tick(3.0) == [("a", Change.SUSPECTED)]
    assert members.takers() == []
    assert members.is_suspect("a")
    assert members.tick(7.9) == []
    assert members.tick(8.0) == [("a", Change.GONE)]
    assert "a" not in members


def test_newer_record_clears_suspicion_and_an_equal_one_does_not() -> None:
    members = Membership(TIMES)
    members.hear(record("a", version=5), 0.0)
    members.tick(3.0)
    assert members.hear(record("a", version=5), 3.5) is None
    assert members.is_suspect("a")
    assert members.hear(record("a", version=6), 3.5) is Change.RECOVERED
    assert not members.is_suspect("a")


def test_old_records_do_not_bring_back_what_is_gone() -> None:
    members = Membership(TIMES)
    members.hear(record("a", version=5), 0.0)
    members.tick(9.0)
    assert members.hear(record("a", version=5), 9.0) is None
    assert members.hear(record("a", version=4), 9.0) is None
    assert members.hear(record("a", version=6), 9.0) is Change.JOINED


def test_gone_nodes_are_forgotten_after_a_while() -> None:
    members = Membership(TIMES)
    members.hear(record("a", version=5), 0.0)
    members.tick(8.0)
    members.tick(108.0)
    assert members.hear(record("a", version=5), 108.0) is Change.JOINED


def test_node_that_says_goodbye_is_gone_at_once() -> None:
    members = Membership(TIMES)
    members.hear(record("a", version=1), 0.0)
    assert members.hear(record("a", version=3, state=NodeState.LEFT), 0.1) is Change.GONE
    assert members.hear(record("a", version=2), 0.2) is None


def test_goodbye_that_overtakes_everything_still_counts() -> None:
    members = Membership(TIMES)
    assert members.hear(record("a", version=3, state=NodeState.LEFT), 0.0) is None
    assert members.hear(record("a", version=2), 0.2) is None
    assert "a" not in members


def test_higher_incarnation_is_a_restart_whatever_its_version() -> None:
    members = Membership(TIMES)
    members.hear(record("a", incarnation=3, version=90), 0.0)
    assert members.hear(record("a", incarnation=4, version=1), 1.0) is Change.RESTARTED
    assert members.hear(record("a", incarnation=3, version=91), 1.0) is None


@pytest.mark.parametrize(
    "news",
    [
        record("a", version=2, state=NodeState.DRAINING),
        record("a", version=2, weight=16),
        record("a", version=2, domain="rack"),
    ],
    ids=["state", "weight", "domain"],
)
def test_version_moves_with_what_placement_depends_on(news: object) -> None:
    members = Membership(TIMES)
    members.hear(record("a"), 0.0)
    before = members.version
    assert members.hear(news, 1.0) is Change.CHANGED  # type: ignore[arg-type]
    assert members.version > before


def test_version_rests_while_only_time_passes() -> None:
    members = Membership(TIMES)
    members.hear(record("a"), 0.0)
    before = members.version
    assert members.hear(record("a", version=2), 1.0) is None
    assert members.version == before


def test_takers_are_active_heard_of_and_have_room() -> None:
    members = Membership(TIMES)
    members.hear(record("full", weight=0), 0.0)
    members.hear(record("leaving", state=NodeState.DRAINING), 0.0)
    members.hear(record("new", state=NodeState.JOINING), 0.0)
    members.hear(record("good"), 0.0)
    assert [r.node for r in members.takers()] == ["good"]


def test_listed_engine_never_ages_and_goes_when_it_is_not_listed() -> None:
    members = Membership(TIMES)
    members.hear(record("engine", incarnation=0, version=0), 0.0)
    members.hear(record("node"), 0.0)
    assert ("engine", Change.GONE) not in members.tick(1000.0)
    assert members.vouched([], 1000.0) == ["engine"]
    assert members.hear(record("engine", incarnation=0, version=0), 1001.0) is Change.JOINED


def test_members_are_bounded_and_those_refused_are_counted() -> None:
    members = Membership(TIMES)
    for n in range(MOST_MEMBERS + 2):
        members.hear(record(f"n{n}"), 0.0)
    assert len(members) == MOST_MEMBERS
    assert members.refused == 2


def test_incarnation_grows_though_the_clock_was_set_back() -> None:
    assert next_incarnation(1000) == 1000
    assert next_incarnation(500, 1000) == 1001
    assert next_incarnation(500, 3, 2000) == 2001


def test_record_survives_its_way_through_discovery() -> None:
    whole = msgspec.structs.replace(
        record("a", domain="rack 1"), tiers=(TierSpace("dram", 1, 2),), free_bytes=7
    )
    assert decode_record(encode_record(whole)) == whole


def test_record_of_a_newer_format_is_a_version_error() -> None:
    data = encode_record(msgspec.structs.replace(record("a"), format=2))
    with pytest.raises(VersionError):
        decode_record(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b'{"node": "a"}',
        b'{"node":"a@b","incarnation":1,"version":1,"state":"active"}',
        b'{"node":"a","incarnation":-1,"version":1,"state":"active"}',
        b'{"node":"a","incarnation":1,"version":1,"state":"asleep"}',
        b" " * 10_000,
    ],
)
def test_what_is_no_record_is_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_record(data)
