"""What was sent where is taken to be there: the index behind a router that hears no events."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from small_router import BLOCK_TOKENS, ask, chosen, speeds

from kvist.cluster.wire import Batch
from kvist.core.events import Stored
from kvist.core.outcome import Tier
from kvist.native import digest
from kvist.router.candidates import LearnsChoices, Prefix
from kvist.router.conductor import KvistRouter, Setting
from kvist.router.index import PrefixIndex
from kvist.router.prefixes import IndexedPrefixes
from kvist.router.protocol import Ask

TOKENS = 100 * BLOCK_TOKENS


@pytest.fixture
def prefixes() -> IndexedPrefixes:
    return IndexedPrefixes(PrefixIndex(block_tokens=BLOCK_TOKENS, fingerprint=bytes(32)))


@pytest.fixture
def router(prefixes: IndexedPrefixes) -> KvistRouter:
    found = KvistRouter(Setting(), speeds(), prefixes, random.Random(0))
    for name in "abcd":
        found.add(name)
    return found


def asked(name: str, text: str = "shared") -> Ask:
    """A request with keys as long as real ones."""
    found = ask(name, TOKENS, text=text)
    return replace(found, keys=tuple(digest(key) for key in found.keys))


def serve(router: KvistRouter, name: str, now_s: float, text: str = "shared") -> tuple[str, int]:
    """A request from its choice to its end."""
    found = chosen(router.choose(asked(name, text), now_s))
    router.first_token(found.booking, now_s + found.ttft_s)
    router.finish(found.booking, now_s + found.ttft_s)
    return found.replica, found.hit_tokens


def test_router_tells_it_of_choices(prefixes: IndexedPrefixes) -> None:
    assert isinstance(prefixes, LearnsChoices)


def test_prefix_is_told_in_tokens(prefixes: IndexedPrefixes) -> None:
    keys = asked("1").keys
    prefixes.chosen("a", keys[:3], 0.0)
    had = 3 * BLOCK_TOKENS
    assert prefixes.match(keys) == {"a": Prefix(had, had, 0, had)}
    assert prefixes.match(()) == {}


def test_request_that_ended_draws_those_that_share_its_prefix(router: KvistRouter) -> None:
    home, hit = serve(router, "1", 0.0)
    assert hit == 0
    for n in range(8):
        replica, hit = serve(router, f"again {n}", 1.0 + n)
        assert replica == home
        assert hit >= TOKENS - BLOCK_TOKENS


def test_other_prompts_spread(router: KvistRouter) -> None:
    homes = {serve(router, str(n), float(n), text=f"other {n}")[0] for n in range(32)}
    assert homes == set("abcd")


def test_replica_that_was_down_has_nothing(router: KvistRouter) -> None:
    home, _ = serve(router, "1", 0.0)
    router.set_state(home, healthy=False)
    router.set_state(home, healthy=True)
    assert serve(router, "2", 1.0)[1] == 0


def test_replica_that_is_gone_has_nothing(router: KvistRouter) -> None:
    home, _ = serve(router, "1", 0.0)
    router.remove(home)
    replica, hit = serve(router, "2", 1.0)
    assert (replica != home, hit) == (True, 0)


def test_nothing_is_believed_for_ever(router: KvistRouter) -> None:
    serve(router, "1", 0.0)
    assert serve(router, "2", 1000.0)[1] == 0


def placed(engines: tuple[str, ...] = ("a", "b", "far")) -> IndexedPrefixes:
    """Replicas whose engines are called `of NAME`; `a` and `b` have nodes, `far` has none."""
    index = PrefixIndex(block_tokens=BLOCK_TOKENS, fingerprint=bytes(32))
    found = IndexedPrefixes(index, engines={name: f"of-{name}" for name in engines})
    found.place({"a": "node-a", "b": "node-b"})
    return found


def says(prefixes: IndexedPrefixes, who: str, tier: Tier, keys: tuple[bytes, ...]) -> None:
    """A publisher's next message."""
    at = prefixes.index.position(who)
    number = 0 if at is None else at.number + 1
    prefixes.index.take(Batch(who, 0, number, (Stored(keys, None, tier),)), 0.0)


def blocks(*counts: int) -> Prefix:
    """A prefix in blocks."""
    return Prefix(*(count * BLOCK_TOKENS for count in counts))


def test_replica_fetches_through_its_node_what_other_nodes_have() -> None:
    prefixes, keys = placed(), asked("1").keys[:8]
    says(prefixes, "of-a", Tier.HBM, keys[:2])
    says(prefixes, "node-a", Tier.DRAM, keys[:4])
    says(prefixes, "node-a", Tier.SSD, keys[4:6])
    assert prefixes.match(keys) == {
        "a": blocks(2, 6, 2, 6),
        "b": blocks(0, 0, 0, 6),
        "far": blocks(0, 0, 0, 0),
    }


def test_what_is_in_hbm_only_is_nobody_elses_to_fetch() -> None:
    prefixes, keys = placed(), asked("1").keys[:8]
    says(prefixes, "of-a", Tier.HBM, keys)
    says(prefixes, "node-b", Tier.DRAM, keys[:1])
    found = prefixes.match(keys)
    assert found["a"] == blocks(8, 8, 0, 8)
    assert found["b"] == blocks(0, 1, 0, 1)
    assert found["far"] == blocks(0, 0, 0, 0)


def test_without_nodes_nobody_fetches_from_another() -> None:
    """Who holds nothing is named, too: a router takes others to have what the best could fetch."""
    prefixes, keys = placed(), asked("1").keys[:8]
    prefixes.place({})
    says(prefixes, "of-a", Tier.HBM, keys)
    assert prefixes.match(keys) == {
        "a": blocks(8, 8, 0, 8),
        "b": blocks(0, 0, 0, 0),
        "far": blocks(0, 0, 0, 0),
    }


def test_replica_that_was_down_is_heard_again() -> None:
    prefixes, keys = placed(), asked("1").keys[:4]
    says(prefixes, "of-a", Tier.HBM, keys)
    prefixes.removed("a")
    assert prefixes.match(keys) == {}
    says(prefixes, "of-a", Tier.HBM, keys[:3])
    assert prefixes.match(keys)["a"] == blocks(3, 3, 0, 3)


def test_prompts_are_named_in_the_keyspace_that_is_taken_over() -> None:
    prefixes = placed()
    tokens = list(range(4 * BLOCK_TOKENS))
    before = prefixes.keys(tokens, "", "")
    says(prefixes, "node-a", Tier.DRAM, before)
    prefixes.rename(b"k" * 32)
    after = prefixes.keys(tokens, "", "")
    assert not set(before) & set(after)
    assert prefixes.match(before) == {}
    says(prefixes, "node-a", Tier.DRAM, after)
    assert prefixes.match(after)["a"] == blocks(0, 4, 0, 4)


def test_adapter_is_known_by_its_name() -> None:
    index = PrefixIndex(block_tokens=BLOCK_TOKENS, fingerprint=bytes(32), by_name=True)
    prefixes, tokens = IndexedPrefixes(index), list(range(BLOCK_TOKENS))
    one, two = (prefixes.keys(tokens, name, "") for name in ("one", "two"))
    assert len({*one, *two, *prefixes.keys(tokens, "", "")}) == 3


@pytest.mark.parametrize(
    ("prefix", "tokens", "tiers"),
    [
        (Prefix(0, 0, 0, 0), 0, {}),
        (Prefix(64, 64, 0, 64), 64, {"hbm": 64}),
        (Prefix(64, 64, 0, 64), 50, {"hbm": 50}),
        (Prefix(64, 256, 128, 256), 256, {"hbm": 64, "dram": 64, "ssd": 128}),
        (Prefix(64, 256, 128, 512), 64, {"hbm": 64}),
        (Prefix(0, 128, 0, 512), 512, {"dram": 128, "peer": 384}),
        (Prefix(0, 128, 128, 512), 512, {"ssd": 128, "peer": 384}),
    ],
    ids=str,
)
def test_hit_is_told_by_tier(prefix: Prefix, tokens: int, tiers: dict[str, int]) -> None:
    assert prefix.by_tier(tokens) == tiers
    assert sum(tiers.values()) == tokens
