"""Each policy picks what its docstring says, and draws only where it says so."""

from __future__ import annotations

import random
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
from small_router import Stub, ask

from kvist.core.errors import ConfigError
from kvist.router.candidates import Candidate, Known, Load, Prefix
from kvist.router.choice import POLICIES, make_policy, select
from kvist.router.policies.cache_aware import CacheAware
from kvist.router.policies.dynamo import Dynamo
from kvist.router.policies.kvist import Kvist, Settings
from kvist.router.protocol import Ask

BLOCK_TOKENS = 64


def _picks(name: str, *candidates: Stub, times: int = 1) -> list[str]:
    policy = make_policy(name, random.Random(1), BLOCK_TOKENS)
    return [policy.pick(ask("a"), candidates).name for _ in range(times)]


def _busy(requests: int = 0, waiting: int = 0, tokens: int = 0, blocks: int = 0) -> Load:
    return Load(requests, waiting, tokens, blocks, 0)


def test_round_robin_takes_each_in_its_turn() -> None:
    assert _picks("round-robin", Stub("a"), Stub("b"), Stub("c"), times=5) == list("abcab")


def test_least_loaded_takes_the_shortest_queue_then_the_shortest_step() -> None:
    idle, slow = Stub("idle", queue=1.0, step=0.1), Stub("slow", queue=1.0, step=0.2)
    assert _picks("least-loaded", Stub("busy", queue=2.0), slow, idle) == ["idle"]


def test_power_of_two_never_takes_the_busiest_of_three() -> None:
    three = [Stub(str(n), busy=_busy(n)) for n in range(3)]
    taken = Counter(_picks("power-of-two", *three, times=200))
    assert set(taken) == {"0", "1"}
    assert taken["0"] > taken["1"]


def test_prefix_takes_the_longest_own_prefix_whatever_the_queue() -> None:
    long = Stub("long", queue=9.0, held=Prefix(0, 640, 0, 640))
    assert _picks("prefix", Stub("short", held=Prefix(64, 64, 0, 640)), long) == ["long"]


def test_cache_aware_weighs_queue_against_work() -> None:
    far, near = Stub("far", queue=0.2, serve=0.5), Stub("near", queue=0.6, serve=0.2)
    assert _picks("cache-aware", far, near) == ["far"]


def test_cache_aware_local_counts_on_own_blocks_only() -> None:
    one = Stub("a", held=Prefix(64, 128, 64, 640))
    CacheAware(peers=False).pick(ask("r"), [one])
    CacheAware(peers=True).pick(ask("r"), [one])
    assert one.asked == [Prefix(64, 128, 64, 128), Prefix(64, 128, 64, 640)]


def test_dynamo_counts_blocks_to_compute_less_credit_and_blocks_that_decode_reads() -> None:
    # 1,000 tokens are 15.6 blocks; HBM counts whole, DRAM 3/4, SSD 1/4, peers' 1/2.
    held = Prefix(hbm_tokens=128, own_tokens=384, ssd_tokens=128, reachable_tokens=512)
    load = Load(3, 1, 640, 20, 5)
    cost = Dynamo(random.Random(0), BLOCK_TOKENS).rank(ask("r"), Stub("a", held=held, busy=load))
    assert cost[0] == pytest.approx((640 + 1000) / 64 - (2 + 2 * 0.75 + 2 * 0.25 + 2 * 0.5) + 25)


def test_dynamo_draws_among_equals() -> None:
    assert set(_picks("dynamo", Stub("a"), Stub("b"), times=50)) == {"a", "b"}


def test_kvist_takes_the_least_ttft_where_nobody_waits() -> None:
    far, near = Stub("far", queue=0.2, serve=0.5), Stub("near", queue=0.6, serve=0.2)
    assert _picks("kvist", far, near) == ["far"]


def test_kvist_spares_work_where_others_wait_for_it() -> None:
    waiting = _busy(requests=3, waiting=3)
    far = Stub("far", queue=0.2, serve=0.5, busy=waiting)
    near = Stub("near", queue=0.6, serve=0.2, busy=waiting)
    assert _picks("kvist", far, near) == ["near"]


def test_kvist_keeps_prompts_whose_steps_are_too_long_from_where_many_decode() -> None:
    def picked(stall: float) -> list[str]:
        decoding = Stub("decoding", serve=9.0, stall=stall, busy=_busy(requests=20))
        return _picks("kvist", decoding, Stub("queued", queue=3.0, serve=9.0))

    assert picked(0.0) == ["decoding"]
    assert picked(0.1) == ["decoding"]  # for each of 20, and less than the queue
    assert picked(1.0) == ["queued"]


def test_kvist_waits_for_no_prefix_longer_than_a_copy_is_worth() -> None:
    away = Stub("away", serve=1.0, spared=500.0, held=Prefix(0, 0, 0, 900))
    for queue, best in ((2.9, "home"), (3.1, "away")):
        home = Stub("home", queue=queue, serve=1.0, held=Prefix(900, 900, 0, 900))
        assert _picks("kvist", home, away) == [best]


def test_kvist_waits_a_while_for_who_has_the_prefix_rather_than_copy_it() -> None:
    def picked(queue: float) -> list[str]:
        home = Stub("home", queue=queue, serve=1.0, held=Prefix(900, 900, 0, 900))
        away = Stub("away", serve=1.5, spared=10.0, held=Prefix(0, 0, 0, 900))
        return _picks("kvist", home, away)

    assert picked(0.6) == picked(2.4) == ["home"]  # a fifth of 10 s is charged for the copy
    assert picked(2.6) == ["away"]


def test_kvist_breaks_ties_by_decode_step_then_draws() -> None:
    slow = Stub("slow", step=0.2)
    taken = Counter(_picks("kvist", Stub("a"), slow, Stub("b"), times=200))
    assert set(taken) == {"a", "b"}
    assert min(taken.values()) > 60


def test_kvist_stays_with_a_session_where_that_costs_little() -> None:
    elsewhere = Known(session=False)
    home = Stub("home", queue=0.015)
    assert _picks("kvist", Stub("away", known=elsewhere), home) == ["home"]
    late = Stub("home", queue=0.5)
    assert _picks("kvist", Stub("away", known=elsewhere), late) == ["away"]


def test_kvist_goes_where_the_adapter_is_unless_the_queue_is_longer_than_its_load() -> None:
    without = Stub("without", known=Known(session=True, lora=False))
    assert _picks("kvist", without, Stub("has", queue=0.9)) == ["has"]
    assert _picks("kvist", without, Stub("has", queue=1.2)) == ["without"]


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_temperature_spreads_the_same_at_any_load(scale: float) -> None:
    policy = Kvist(random.Random(2), Settings(temperature=0.5))
    three = [Stub(str(n), queue=n * scale) for n in range(3)]
    taken = Counter(policy.pick(ask("r"), three).name for _ in range(3000))
    assert taken["0"] > taken["1"] > taken["2"] > 0
    assert taken["1"] / taken["0"] == pytest.approx(0.37, abs=0.05)  # exp(-0.5 / 0.5)


def test_decode_goes_to_the_shortest_step() -> None:
    policy = make_policy("kvist", random.Random(0), BLOCK_TOKENS)
    both = [Stub("p", role="prefill"), Stub("d", role="decode", step=0.2),
            Stub("e", role="decode", step=0.1)]  # fmt: skip
    found = select(policy, ask("r"), both)
    assert found is not None
    assert (found.prefill.name, found.decode.name) == ("p", "e")
    assert found.ttft_s == found.queue_s + found.serve_s == 1.0


@pytest.mark.parametrize("name", POLICIES)
def test_without_a_replica_for_either_part_nothing_is_selected(name: str) -> None:
    policy = make_policy(name, random.Random(0), BLOCK_TOKENS)
    assert select(policy, ask("r"), []) is None
    assert select(policy, ask("r"), [Stub("p", role="prefill")]) is None
    assert select(policy, ask("r"), [Stub("d", role="decode")]) is None
    assert select(policy, ask("r"), [Stub("x")]) is not None


class Longest:
    """A scorer that likes long names."""

    def score(self, ask: Ask, candidate: Candidate) -> float:
        return -float(len(candidate.name))


class Needy(Longest):
    """A scorer that wants to be told something."""

    def __init__(self, wish: str) -> None:
        self.wish = wish


def test_a_scorer_of_ones_own_is_named_in_place_of_a_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("own_scorers")
    module.Longest = Longest  # type: ignore[attr-defined]
    module.Nothing = dict  # type: ignore[attr-defined]
    module.Needy = Needy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_scorers", module)
    assert _picks("own_scorers:Longest", Stub("a"), Stub("long"), Stub("b")) == ["long"]
    with pytest.raises(ConfigError, match="has no method `score`"):
        _picks("own_scorers:Nothing", Stub("a"))
    with pytest.raises(ConfigError, match="cannot load 'own_scorers:Missing'"):
        _picks("own_scorers:Missing", Stub("a"))
    with pytest.raises(ConfigError, match="without arguments"):
        _picks("own_scorers:Needy", Stub("a"))


@pytest.mark.parametrize("name", [":Class", ".here:Class", "broken_scorers:Class", "no.such:Class"])
def test_a_scorer_that_cannot_be_loaded_is_said_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_scorers.py").write_text("def (")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot load .*; name it package\.module:Class"):
        _picks(name, Stub("a"))


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"\$\.router\.policy: unknown policy 'magic'; .*kvist"):
        _picks("magic", Stub("a"))
