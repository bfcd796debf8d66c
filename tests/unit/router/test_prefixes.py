"""What was sent where is taken to be there: the index behind a router that hears no events."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from small_router import BLOCK_TOKENS, ask, chosen, speeds

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
