"""The shadow of leaf-first LRU: it counts what that would have hit, and says when it is ahead."""

import random

from kvist.core.hints import Hints
from kvist.policy import Value
from kvist.policy.duel import Duel, Turn
from kvist.sim.contenders import contender
from kvist.sim.replay import replay
from kvist.sim.traces import Request, Trace
from kvist.testing.policy_suite import key


def test_duel_counts_the_hits_that_leaf_lru_has() -> None:
    rng = random.Random(5)
    requests = [
        Request(5.0 * n, tuple(b"%d.%d" % (name, i) for i in range(8)), 8 * 64, 10)
        for n, name in enumerate(rng.choices(range(90), k=800))
    ]
    trace, capacity = Trace.of("shadow", 64, requests), 200
    lru = replay(trace, contender("leaf-lru", trace, capacity), capacity)
    shadow = Duel()
    last: dict[int, Turn] = {}
    hits = 0.0
    for request in requests:
        name = int(request.keys[0].split(b".")[0])
        known = sum(turn.blocks for turn in last.values())
        turn = shadow.begin(min(capacity, known), full=known > capacity)
        old = last.get(name)
        hits += 8 * old.share if old is not None else 0
        shadow.move(old, turn, 8)
        last[name] = turn
    assert abs(hits / trace.accesses_blocks - lru.block_hit_ratio) < 0.002


def test_duel_is_behind_only_after_a_loss_beyond_one_request() -> None:
    duel = Duel()
    old = duel.begin(100, full=True)
    duel.move(None, old, 100)
    for _ in range(3):
        new = duel.begin(100, full=True)
        duel.move(old, new, 100)
        old = new
    assert not duel.behind or duel._deficit > 100
    duel.begin(100, full=True)
    assert duel.behind


def test_duel_tries_again_after_as_many_turns_as_led_to_the_loss() -> None:
    duel = Duel()
    old = duel.begin(100, full=True)
    duel.move(None, old, 100)
    turns = 0
    while not duel.behind:
        new = duel.begin(100, full=True)
        duel.move(old, new, 100)
        old, turns = new, turns + 1
    for _ in range(turns + 2):
        duel.begin(100, full=True)
    assert not duel.behind


def test_duel_remembers_a_bounded_number_of_turns() -> None:
    clock = iter(range(10**9))
    policy = Value(lambda: float(next(clock)))
    for _ in range(5000):
        policy.begin(Hints())
        policy.insert(key(1), None)
        policy.insert(key(2), key(1))
    assert len(policy._duel._turns) < 300
