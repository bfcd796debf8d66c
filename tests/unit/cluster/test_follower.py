"""Readers of a stream: whatever is lost, doubled or late, they end with what the publisher has."""

from __future__ import annotations

import random

import pytest
from small import batches, key, received, stored

from kvist.cluster.directory import Directory, Limits, Position
from kvist.cluster.follower import Ask, Follower, Patience
from kvist.cluster.log import EventLog
from kvist.cluster.wire import Batch
from kvist.core.events import Cleared, Removed
from kvist.core.outcome import Tier

PATIENCE = Patience(patience_s=1.0, retry_s=2.0, most_retry_s=5.0, most_held=4)


def steps(count: int) -> list[Batch]:
    return batches(EventLog(block_tokens=16), [[stored(n)] for n in range(count)])


def test_batches_in_order_are_applied_at_once() -> None:
    follower = Follower("a", PATIENCE, incarnation=1)
    for batch in steps(3):
        assert follower.take(batch, 0.0).batches == (batch,)
    assert follower.complete


def test_duplicates_are_applied_once() -> None:
    follower = Follower("a", PATIENCE, incarnation=1)
    first, second, _ = steps(3)
    for batch in (first, second):
        follower.take(batch, 0.0)
    assert follower.take(first, 0.0).batches == ()
    assert follower.take(second, 0.0).batches == ()
    assert follower.duplicates == 2


def test_what_overtook_is_held_until_its_turn() -> None:
    follower = Follower("a", PATIENCE, incarnation=1)
    sent = steps(4)
    follower.take(sent[0], 0.0)
    assert follower.take(sent[3], 0.0).batches == ()
    assert follower.take(sent[2], 0.0).batches == ()
    assert follower.take(sent[1], 0.5).batches == (sent[1], sent[2], sent[3])
    assert follower.ask(100.0) is None
    assert follower.gaps == 0  # late, not lost


@pytest.mark.parametrize("told_by", ["a later batch", "a beat"])
def test_loss_that_is_asked_for_counts_once(told_by: str) -> None:
    follower = Follower("a", PATIENCE, incarnation=1)
    sent = steps(4)
    follower.take(sent[0], 0.0)
    if told_by == "a beat":
        follower.expect(1, 2, 0.0)
    else:
        follower.take(sent[2], 0.0)
    asked = [t for t in range(20) if follower.ask(float(t))]
    assert len(asked) > 1
    assert follower.gaps == 1
    follower.take(sent[1], 20.0)
    follower.take(sent[2], 20.0)
    assert follower.complete
    follower.expect(1, 3, 21.0)
    assert follower.ask(22.0) == Ask("a", 1, 3)
    assert follower.gaps == 2


def test_reader_that_begins_has_lost_nothing() -> None:
    follower = Follower("a", PATIENCE, incarnation=1)
    follower.expect(1, 2, 0.0)
    assert follower.ask(0.0) == Ask("a", 1, 0)
    assert follower.gaps == 0


def test_gap_is_asked_for_after_patience_and_then_ever_more_rarely() -> None:
    follower = Follower("a", PATIENCE, incarnation=1)
    sent = steps(4)
    follower.take(sent[0], 0.0)
    follower.take(sent[2], 10.0)
    asked = [t for t in range(40) if follower.ask(float(t)) is not None and t >= 10]
    assert asked == [11, 13, 17, 22, 27, 32, 37]


def test_ask_names_the_first_batch_that_is_missing() -> None:
    follower = Follower("a", PATIENCE, incarnation=1)
    sent = steps(4)
    follower.take(sent[0], 0.0)
    follower.take(sent[3], 0.0)
    assert follower.ask(1.0) == Ask("a", 1, 1)


def test_held_batches_are_bounded() -> None:
    follower = Follower("a", PATIENCE, incarnation=1)
    sent = steps(20)
    follower.take(sent[0], 0.0)
    for batch in sent[2:]:
        follower.take(batch, 0.0)
    assert len(follower.take(sent[1], 0.0).batches) == 1 + PATIENCE.most_held
    assert not follower.complete
    assert follower.ask(1.0) == Ask("a", 1, 2 + PATIENCE.most_held)


def test_restart_voids_everything_and_its_zero_is_not_old() -> None:
    follower = Follower("a", PATIENCE, incarnation=1)
    for batch in steps(3):
        follower.take(batch, 0.0)
    anew = batches(EventLog(block_tokens=16), [[stored(9)]], incarnation=2)
    progress = follower.take(anew[0], 0.0)
    assert progress.restarted
    assert progress.batches == (anew[0],)


def test_late_message_of_a_former_start_is_ignored() -> None:
    follower = Follower("a", PATIENCE, incarnation=1)
    old = steps(3)
    anew = batches(EventLog(block_tokens=16), [[stored(9)]], incarnation=2)
    follower.take(anew[0], 0.0)
    assert follower.take(old[1], 0.0).batches == ()
    assert follower.stale == 1


def test_stock_engine_that_begins_at_zero_again_was_restarted() -> None:
    follower = Follower("a", PATIENCE)
    sent = [Batch("a", 0, n, (stored(n),)) for n in range(3)]
    follower.expect(0, 0, 0.0)
    for batch in sent:
        follower.take(batch, 0.0)
    assert follower.take(sent[0], 0.0).restarted


def test_stock_engine_whose_first_message_was_missed_was_restarted_all_the_same() -> None:
    """A subscriber connects again some time after the engine did, so number 0 may be lost."""
    directory = Directory(Limits(patience=PATIENCE))
    directory.expect("a", 0, 0, 0.0)
    for number in range(5):
        directory.take(Batch("a", 0, number, (stored(number),)), 0.0)
    directory.take(Batch("a", 0, 2, (stored(12),)), 10.0)
    assert len(directory) == 0
    assert directory.asks(11.0) == [Ask("a", 0, 0)]
    for number in range(3):
        directory.take(Batch("a", 0, number, (stored(10 + number),), replayed=True), 11.0)
    assert [directory.holders(key(n)) != [] for n in (0, 4, 10, 12)] == [False, False, True, True]
    assert directory.counts.restarts == 1


def test_stock_engine_whose_connection_broke_is_asked_for_everything() -> None:
    """It may have been restarted, and have said little since: no number tells."""
    directory = Directory(Limits(patience=PATIENCE))
    directory.expect("a", 0, 0, 0.0)
    directory.take(Batch("a", 0, 0, (stored(0),)), 0.0)
    directory.reconnected("a", 5.0)
    directory.reconnected("unknown", 5.0)
    assert (len(directory), directory.asks(5.0)) == (0, [Ask("a", 0, 0)])
    directory.take(Batch("a", 0, 0, (stored(7),), replayed=True), 6.0)
    directory.take(Batch("a", 0, 1, (stored(8),)), 6.0)
    assert [directory.holders(key(n)) != [] for n in (0, 7, 8)] == [False, True, True]
    assert directory.complete


def test_kvist_node_whose_connection_broke_says_itself_whether_it_was_restarted() -> None:
    directory = Directory(Limits(patience=PATIENCE))
    for batch in steps(2):
        directory.take(batch, 0.0)
    directory.reconnected("a", 5.0)
    assert (len(directory), directory.asks(9.0)) == (2, [])


def test_message_that_a_replay_has_brought_before_is_no_restart() -> None:
    follower = Follower("a", PATIENCE)
    follower.take(Batch("a", 0, 3, (stored(3),)), 0.0)
    for number in range(6):
        follower.take(Batch("a", 0, number, (stored(number),), replayed=True), 1.0)
    for number in (4, 5, 6):
        assert not follower.take(Batch("a", 0, number, (stored(number),)), 1.0).restarted
    assert follower.last == 6


def test_stock_engine_that_never_answers_is_followed_from_what_was_heard() -> None:
    directory = Directory(Limits(patience=PATIENCE))
    for number in (0, 1, 5):
        directory.take(Batch("a", 0, number, (stored(number),)), 0.0)
    asks = [ask for now_s in range(1, 60) for ask in directory.asks(float(now_s))]
    assert asks == [Ask("a", 0, 2)] * PATIENCE.most_asks
    assert [directory.holders(key(n)) != [] for n in (0, 1, 5)] == [False, False, True]
    assert directory.complete


def test_publisher_that_goes_in_a_pause_leaves_nothing() -> None:
    def pause() -> None:
        directory.drop("a")
        directory.expect("b", 1, 0, 0.0)

    directory = Directory(Limits(patience=PATIENCE), pause=pause)
    directory.take(Batch("a", 0, 0, (stored(0), stored(1))), 0.0)
    assert len(directory) == 0
    assert directory.nodes() == ["b"]


def test_replay_that_begins_at_zero_is_no_restart_of_a_stock_engine() -> None:
    """vLLM sends a batch before it can replay it: the answer may end before what was heard live."""
    follower = Follower("a", PATIENCE)
    follower.expect(0, 0, 0.0)
    for number in (0, 1):
        follower.take(Batch("a", 0, number, (stored(number),)), 0.0)
    progress = follower.take(Batch("a", 0, 0, (stored(0),), replayed=True), 0.0)
    assert (progress.batches, progress.restarted, follower.last) == ((), False, 1)


def test_stock_engine_is_followed_from_where_its_replay_begins() -> None:
    """It has published for longer than its buffer reaches back; asking again would never help."""
    directory = Directory(Limits(patience=PATIENCE))
    directory.expect("a", 0, 0, 0.0)
    assert directory.asks(0.0)
    sent = [Batch("a", 0, n, (stored(n),), replayed=True) for n in range(10, 20)]
    directory.take(Batch("a", 0, 19, (stored(19),)), 0.5)
    for batch in sent:
        directory.take(batch, 0.5)
    assert len(directory) == 0
    directory.answered("a", 1.0)
    assert len(directory) == PATIENCE.most_held - 1
    (ask,) = directory.asks(9.0)
    for batch in sent[ask.number - 10 :]:
        directory.take(batch, 9.5)
    assert directory.complete
    assert len(directory) == 10


def test_gap_of_a_stock_engine_voids_what_was_known_before_it() -> None:
    """A removal may have been in the gap."""
    directory = Directory(Limits(patience=PATIENCE))
    directory.expect("a", 0, 0, 0.0)
    for number in (0, 1, 5):
        directory.take(Batch("a", 0, number, (stored(number),)), 0.0)
    directory.answered("a", 1.0)
    assert [directory.holders(key(n)) != [] for n in (0, 1, 5)] == [False, False, True]


def test_kvist_node_is_waited_for_until_it_dumps() -> None:
    directory = Directory(Limits(patience=PATIENCE))
    directory.expect("a", 1, 0, 0.0)
    sent = steps(6)
    directory.take(sent[4], 0.0)
    directory.answered("a", 1.0)
    assert len(directory) == 0
    assert directory.asks(3.0) == [Ask("a", 1, 0)]


def test_batch_that_only_a_record_tells_of_is_asked_for() -> None:
    """The last batch was lost, and nothing follows it; the record came by way of discovery."""
    follower = Follower("a", PATIENCE, incarnation=1)
    first, second = steps(2)
    follower.take(first, 0.0)
    follower.expect(1, 0, 0.0)
    assert follower.complete
    follower.expect(1, 1, 5.0)
    assert follower.ask(5.5) is None
    assert follower.ask(6.0) == Ask("a", 1, 1)
    follower.take(second, 6.5)
    assert follower.complete
    follower.expect(0, 9, 7.0)
    assert follower.complete


@pytest.mark.parametrize("seed", range(25))
def test_directory_equals_the_publisher_after_any_losses(seed: int) -> None:
    rng = random.Random(seed)
    log = EventLog(block_tokens=16, most_batches=rng.choice((2, 5, 100)))
    directory = Directory(Limits(patience=PATIENCE))
    on_the_wire: list[Batch] = []
    for step in range(80):
        tier = rng.choice((Tier.DRAM, Tier.SSD))
        log.record(
            stored(rng.randrange(15), tier=tier)
            if rng.random() < 0.6
            else Removed((key(rng.randrange(15)),), tier)
        )
        if rng.random() < 0.03:
            log.record(Cleared())
        batch = received(log.seal(0.0))
        if rng.random() > 0.3:
            on_the_wire += [batch] * rng.choice((1, 1, 2))
        rng.shuffle(on_the_wire)
        while on_the_wire and rng.random() < 0.6:
            directory.take(on_the_wire.pop(), float(step))
    for batch in on_the_wire:
        directory.take(batch, 90.0)
    directory.take(received(log.seal(0.0)), 95.0)
    for ask in directory.asks(100.0):
        for sealed in log.since(ask.number, 0.0):
            directory.take(received(sealed), 100.0)
    assert directory.complete
    assert directory.position("a") == Position(1, log.number)
    believed = {tag: holders["a"] for tag, holders in directory.contents()}
    assert believed == {k[:16]: tiers for k, tiers in log.present()}
