"""Totals that the tier below keeps become increments on vLLM's channels."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvist.connectors.vllm.roles import lower_samples
from kvist.connectors.vllm.stats import Tally, Totals
from kvist.store import NullStore


def test_totals_become_increments_and_gauges_stay() -> None:
    totals = Totals()
    calls, known = "kvist_remote_calls_total.get", "kvist_remote_known_blocks"
    assert totals.since({calls: 5.0, known: 9.0}) == {calls: 5.0, known: 9.0}
    assert totals.since({calls: 7.0, known: 4.0}) == {calls: 2.0, known: 4.0}
    tally = Tally()
    for name, amount in totals.since({calls: 7.0, known: 4.0}).items():
        tally.add(name, amount)
    assert tally.take() == {known: 4.0}


def test_store_without_numbers_of_its_own_has_none() -> None:
    assert lower_samples(NullStore()) == {}
