"""The value policy: C++ and its twin give the same victims, call for call."""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from kvist.core.hints import Finish, Hints
from kvist.core.keys import Key
from kvist.policy.value_twin import Value as Twin

if os.environ.get("KVIST_NATIVE") == "off":
    pytest.skip("nothing to compare with", allow_module_level=True)

from kvist.policy.value_native import Value as Native

_CAPACITY_BLOCKS = 300


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return self.now_s


def _key(name: int, depth: int) -> Key:
    return b"%d.%d" % (name, depth)


def _weigh(key: Key) -> float:
    return 1.0 + int(key.split(b".")[1]) / 3


class _Pair:
    """Both, driven alike."""

    def __init__(self, **arguments: Any) -> None:
        self.clocks = (_Clock(), _Clock())
        self.both = tuple(
            make(clock, **arguments)
            for make, clock in zip((Twin, Native), self.clocks, strict=True)
        )

    def at(self, now_s: float) -> None:
        for clock in self.clocks:
            clock.now_s = now_s

    def call(self, name: str, *arguments: object) -> Any:
        ours, theirs = (getattr(policy, name)(*arguments) for policy in self.both)
        assert ours == theirs
        assert self.clocks[0].calls == self.clocks[1].calls
        return ours

    def evict(self, blocks: int, rng: random.Random, skip: float) -> list[Key]:
        """Removes so many victims, skipping some."""
        gone: list[Key] = []
        walks = tuple(policy.victims() for policy in self.both)
        while len(gone) < blocks:
            ours, theirs = (next(walk, None) for walk in walks)
            assert ours == theirs
            if ours is None:
                break
            if rng.random() >= skip:
                self.call("remove", ours)
                gone.append(ours)
        return gone

    def check(self) -> None:
        assert len(self.both[0]) == len(self.both[1])
        assert len(self.both[0]._nodes) == len(self.both[1]._nodes)
        assert len(self.both[0]._duel._turns) == len(self.both[1]._duel._turns)


def _requests(rng: random.Random) -> Iterator[tuple[float, tuple[Key, ...], Hints]]:
    """A few loops of different periods, hot prompts, chats that grow, and prompts of one use."""
    time_s = 0.0
    for n in range(3000):
        time_s += rng.expovariate(0.5) if n % 7 else 0.0
        name = rng.choice((n % 40, 100 + n % 150, 300 + int(rng.paretovariate(1.0)) % 50, 1000 + n))
        depth = rng.randrange(1, 3 + name % 9)
        keys = tuple(_key(name, i) for i in range(depth))
        output = rng.choice((None, rng.randrange(300)))
        partial = keys[-1] if rng.random() < 0.3 else None
        yield time_s, keys, Hints(rng.choice(list(Finish)), output, partial)


@pytest.mark.parametrize("skip", [0.0, 0.2])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"weigh": _weigh}, {"ghost_blocks": 400}, {"ghost_blocks": 0}, {"ghost_blocks": 3}],
    ids=["default", "weigh", "ghosts_400", "ghosts_0", "ghosts_3"],
)
def test_native_value_evicts_what_its_twin_does(arguments: dict[str, Any], skip: float) -> None:
    rng = random.Random(f"{sorted(arguments)} {skip}")
    pair = _Pair(**arguments)
    resident: set[Key] = set()
    for time_s, keys, hints in _requests(rng):
        pair.at(time_s)
        if rng.random() < 0.9:
            pair.call("begin", hints)
        for parent, key in reversed(list(zip((None, *keys), keys, strict=False))):
            if key in resident:
                pair.call("touch", key)
            else:
                pair.call("insert", key, parent)
                resident.add(key)
        if rng.random() < 0.1:
            pair.call("prefers", rng.choice(keys))
        resident.difference_update(pair.evict(len(resident) - _CAPACITY_BLOCKS, rng, skip))
        pair.check()
    assert list(pair.both[0].victims()) == list(pair.both[1].victims())


def test_native_value_is_the_twin_between_any_calls() -> None:
    """Inserts before parents, removals of anything, walks that stop, wait, or are left behind."""
    rng = random.Random(11)
    pair = _Pair(ghost_blocks=60)
    waiting: list[tuple[Iterator[Key], ...]] = []
    for step in range(20_000):
        pair.at(step / 7)
        key, parent = (_key(rng.randrange(40), rng.randrange(4)) for _ in range(2))
        what = rng.randrange(12)
        if what < 5:
            pair.call("insert", key, parent if what else None)
        elif what < 7:
            pair.call("touch", key)
        elif what < 9:
            pair.call("remove", key)
        elif what == 9:
            pair.call("prefers", key)
        elif what == 10:
            heads = [list(islice(policy.victims(), step % 5)) for policy in pair.both]
            assert heads[0] == heads[1]
        else:
            waiting = [tuple(policy.victims() for policy in pair.both)]
            assert next(waiting[0][0], None) == next(waiting[0][1], None)
        pair.check()


def test_native_value_refuses_a_key_that_is_not_bytes() -> None:
    policy = Native(lambda: 0.0)
    with pytest.raises(TypeError):
        policy.insert("key", None)  # type: ignore[arg-type]
    assert len(policy) == 0


def test_native_value_passes_on_what_its_callables_raise() -> None:
    def fails(*_: object) -> float:
        raise OSError("no time")

    with pytest.raises(OSError, match="no time"):
        Native(fails)
    policy = Native(lambda: 0.0, weigh=fails)
    with pytest.raises(OSError, match="no time"):
        policy.insert(b"key", None)
    assert list(policy.victims()) == []


def test_native_value_is_collected_though_its_clock_knows_it() -> None:
    class Owner:
        def __init__(self) -> None:
            self.policy = Native(self.clock)
            self.policy.insert(b"key", None)

        def clock(self) -> float:
            return 0.0

    owner = weakref.ref(Owner())
    gc.collect()
    assert owner() is None


def test_native_walk_keeps_its_policy_alive() -> None:
    policy = Native(lambda: 0.0)
    policy.insert(b"key", None)
    walk = policy.victims()
    del policy
    assert list(walk) == [b"key"]
