"""Mooncake Store as a remote, where its client can be imported (it needs libibverbs)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from real import mooncake_master

from kvist.adapters.opening import Limits, open_adapter
from kvist.adapters.protocol import StorageAdapter
from kvist.core.errors import TierError
from kvist.testing.adapter_suite import AdapterSuite, suite_name
from kvist.testing.tier_suite import read_block, suite_block, suite_key, suite_payload
from kvist.tiers.remote import LearnLimits, RemoteTier

SEGMENT_BYTES = 64 << 20


@pytest.fixture(scope="module")
def addresses() -> Iterator[tuple[str, str]]:
    with mooncake_master() as addresses:
        yield addresses


@pytest.fixture(scope="module")
def pool(addresses: tuple[str, str]) -> Iterator[object]:
    """A client that gives the pool its memory, as a storage node does."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    master, metadata = addresses
    assert store.setup("127.0.0.1", metadata, SEGMENT_BYTES, 16 << 20, "tcp", "", master) == 0
    yield store
    store.close()


@pytest.fixture
def url(addresses: tuple[str, str], pool: object) -> str:
    pool.remove_all(True)  # type: ignore[attr-defined]
    master, metadata = addresses
    return f"mooncake://{master}?metadata={metadata}&buffer={16 << 20}"


def open_mooncake(url: str) -> StorageAdapter:
    return open_adapter(url, Limits(timeout_s=20.0))


class TestMooncakeAdapter(AdapterSuite):
    limits_itself = lists = takes_empty = tells_winner = False

    @pytest.fixture(autouse=True)
    def _url(self, url: str) -> None:
        self.url = url

    def open_adapter(self, directory: Path, capacity_bytes: int | None = None) -> StorageAdapter:
        return open_mooncake(self.url)


def test_blocks_of_one_host_are_found_by_anothers_probes(url: str) -> None:
    one, two = (
        RemoteTier(open_mooncake(url), keyspace=bytes(32), limits=LearnLimits(probe_s=1.0))
        for _ in range(2)
    )
    one.put([suite_payload(i) for i in range(10)])
    assert two.contains_run([suite_key(i) for i in range(20)]) == 10
    assert [read_block(two, i) for i in range(10)] == [suite_block(i) for i in range(10)]
    with pytest.raises(TierError, match="cannot list"):
        two.clear()
    assert two.contains_run([suite_key(0)]) == 0
    one.close()
    two.close()


def test_master_that_is_gone_is_an_error_of_the_tier() -> None:
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    adapter = open_adapter(
        "mooncake://127.0.0.1:9?metadata=http://127.0.0.1:9/metadata", Limits(timeout_s=2.0)
    )
    with pytest.raises(TierError):
        adapter.delete([suite_name(1)])
