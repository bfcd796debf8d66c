"""The publisher's log: replays are exact, dumps are consistent, everything is bounded."""

from __future__ import annotations

import random

import pytest
from small import batches, chain, key, received, stored

from kvist.cluster.log import EventLog
from kvist.core.events import Cleared, KvEvent, Removed, Stored
from kvist.core.keys import Key
from kvist.core.outcome import Tier

State = dict[Key, frozenset[Tier]]


def applied(events: list[KvEvent], state: State) -> State:
    """What a reader has who applied these events."""
    state = dict(state)
    for event in events:
        if isinstance(event, Cleared):
            state.clear()
        elif isinstance(event, Stored):
            for k in event.keys:
                state[k] = state.get(k, frozenset()) | {event.tier}
        else:
            for k in event.keys:
                left = state.pop(k, frozenset()) - {event.tier}
                if left:
                    state[k] = left
    return state


def test_replay_gives_the_batches_again_as_they_were() -> None:
    log = EventLog(block_tokens=16)
    sent = batches(log, [[stored(1)], [stored(2)], [Removed((key(1),), Tier.DRAM)]])
    assert [received(s) for s in log.since(1, 0.0)] == sent[1:]
    assert log.since(3, 0.0) == []


def test_ask_older_than_the_buffer_gets_a_dump_with_the_newest_number() -> None:
    log = EventLog(block_tokens=16, most_batches=2)
    batches(log, [[stored(n)] for n in range(5)])
    (dump,) = log.since(0, 0.0)
    assert dump.number == log.number == 4
    assert received(dump).is_base
    assert applied(list(received(dump).events), {}).keys() == {key(n) for n in range(5)}


def test_what_is_not_sealed_yet_is_in_no_dump() -> None:
    log = EventLog(block_tokens=16, most_batches=1)
    batches(log, [[stored(1)], [stored(2)]])
    log.record(stored(3))
    log.record(Removed((key(1),), Tier.DRAM))
    (dump,) = log.since(0, 0.0)
    assert applied(list(received(dump).events), {}).keys() == {key(1), key(2)}


def test_dump_is_made_once_while_the_buffer_leads_on_from_it() -> None:
    log = EventLog(block_tokens=16, most_batches=3)
    batches(log, [[stored(n)] for n in range(6)])
    log.since(0, 0.0)
    batches(log, [[stored(6)], [stored(7)]])
    answer = log.since(0, 0.0)
    assert [s.number for s in answer] == [5, 6, 7]
    assert log.dumps == 1
    batches(log, [[stored(8)], [stored(9)]])
    assert log.since(0, 0.0)[0].number == 9
    assert log.dumps == 2


@pytest.mark.parametrize("seed", range(20))
def test_any_answer_leads_to_what_is_there(seed: int) -> None:
    """Events go on between the dump and what follows it."""
    rng = random.Random(seed)
    log = EventLog(block_tokens=16, most_batches=rng.choice((1, 3, 50)))
    truth: State = {}
    for _ in range(60):
        for _ in range(rng.randrange(4)):
            event = _drawn(rng)
            truth = applied([event], truth)
            log.record(event)
        log.seal(0.0)
        if rng.random() < 0.4:
            heard: State = {}
            for sealed in log.since(0, 0.0):
                heard = applied(list(received(sealed).events), heard)
            assert heard == truth
    assert dict(log.present()) == truth


def _drawn(rng: random.Random) -> KvEvent:
    tier = rng.choice((Tier.DRAM, Tier.SSD))
    dice = rng.random()
    if dice < 0.6:
        return stored(rng.randrange(12), rng.randrange(12), tier=tier)
    if dice < 0.97:
        return Removed((key(rng.randrange(12)),), tier)
    return Cleared()


def test_clearing_one_keyspace_leaves_the_others() -> None:
    log = EventLog(block_tokens=16)
    log.record(stored(1), b"x")
    log.record(stored(2), b"y")
    log.seal(0.0)
    log.record(Cleared(), b"x")
    batch = received(log.seal(0.0))
    assert batch.events == (Removed((key(1),), Tier.DRAM),)
    log.record(Cleared(), b"y")
    assert received(log.seal(0.0)).events == (Cleared(),)
    assert dict(log.present()) == {}


def test_dump_names_the_neighbours_of_a_sequence_in_one_event() -> None:
    log = EventLog(block_tokens=16, most_batches=1)
    keys = chain(1, 6)
    for n, k in enumerate(keys):
        log.record(Stored((k,), keys[n - 1] if n else None, Tier.DRAM))
        log.seal(0.0)
    (dump,) = log.since(0, 0.0)
    assert received(dump).events == (Cleared(), Stored(tuple(keys), None, Tier.DRAM))


def test_log_says_when_too_much_waits() -> None:
    log = EventLog(block_tokens=16, most_pending=2)
    log.record(stored(1))
    assert not log.overdue
    log.record(stored(2))
    assert log.overdue
    log.seal(0.0)
    assert not log.overdue


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        EventLog(block_tokens=0)
