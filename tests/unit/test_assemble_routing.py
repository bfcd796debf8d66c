"""A router and a queue as the configuration says."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from kvist.assemble.routing import queue_of, router_of
from kvist.config import RouterConfig
from kvist.core.errors import ConfigError
from kvist.core.keys import Key
from kvist.router.candidates import Prefix
from kvist.router.conductor import Setting
from kvist.router.fairness import FairQueue
from kvist.router.protocol import Ask, Choice, Need, Refused
from kvist.sim.des.routing_spec import RoutingSpec


class Nothing:
    """Nobody holds anything."""

    def match(self, keys: Sequence[Key]) -> Mapping[str, Prefix]:
        """Nothing."""
        return {}


def _ask(number: int, **more: object) -> Ask:
    return Ask(str(number), (), 1000, **more)  # type: ignore[arg-type]


def test_a_router_is_made_with_the_limits_of_its_configuration() -> None:
    config = RouterConfig(ttft_s=0.5, prefill_tokens_per_s=5000)
    router = router_of(config, 16, Nothing(), random.Random(0))
    router.add("a")
    first = router.choose(_ask(1), 0.0)
    assert isinstance(first, Choice)
    assert first.ttft_s == pytest.approx(0.22)  # 1,000 tokens, and a pass of none
    assert isinstance(router.choose(_ask(2), 0.0), Choice)
    assert isinstance(router.choose(_ask(3), 0.0), Refused)


def test_admission_can_be_off_and_the_policy_another() -> None:
    config = RouterConfig(policy="round-robin", admission="none", ttft_s=0.001)
    router = router_of(config, 16, Nothing(), random.Random(0))
    for name in "abc":
        router.add(name)
    found = [router.choose(_ask(n), 0.0) for n in range(6)]
    assert [c.replica for c in found if isinstance(c, Choice)] == list("abcabc")
    with pytest.raises(ConfigError, match="unknown policy"):
        router_of(RouterConfig(policy="magic"), 16, Nothing(), random.Random(0))


def test_the_queue_is_bounded_as_configured() -> None:
    queue: FairQueue = queue_of(RouterConfig(waiting=3, tenant_waiting=2))
    refused = [queue.offer(_ask(n, tenant="ab"[n // 3]), Need(1, 0.0), 0.0) for n in range(5)]
    assert [r is not None for r in refused] == [False, False, True, False, True]


def test_weights_of_tenants_come_from_the_configuration() -> None:
    queue = queue_of(RouterConfig(tenant_weight={"b": 3.0}))
    for n in range(200):
        assert queue.offer(_ask(n, tenant="ab"[n % 2]), Need(4096, 0.0), 0.0) is None
    taken = [found.tenant for _ in range(100) if (found := queue.take()) is not None]
    assert taken.count("b") == 75


def test_the_shipped_order_is_the_one_that_is_simulated() -> None:
    config = RouterConfig()
    assert config.hold_s == Setting().hold_s
    spec = RoutingSpec()
    assert config.overtaken_s == spec.overtaken_s
    queue = queue_of(config)
    queue.offer(_ask(1), Need(9000, 9.0), 0.0)
    queue.offer(_ask(2), Need(100, 0.01), config.overtaken_s - 1)
    queue.offer(_ask(3), Need(100, 0.01), config.overtaken_s + 1)
    taken = [found.request for _ in range(3) if (found := queue.take()) is not None]
    assert taken == [_ask(n).request for n in (2, 1, 3)]
