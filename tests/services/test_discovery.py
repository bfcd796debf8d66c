"""Discovery by a real Redis server: the published suite, and a server that dies."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from real import HOST, Server, redis_server

from kvist.cluster.discovery.protocol import Discovery
from kvist.core.errors import TierError
from kvist.testing.discovery_suite import LONG_S, DiscoverySuite, suite_record


class TestRedisDiscovery(DiscoverySuite):
    @pytest.fixture(autouse=True)
    def _server(self, redis_service: Server) -> None:
        import redis

        self.url = f"redis://{HOST}:{redis_service.port}/0"
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    def open_discovery(self, directory: Path) -> Discovery:
        from kvist.cluster.discovery.redis import RedisDiscovery

        return RedisDiscovery(self.url, timeout_s=20.0)

    def let_pass(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def test_foreign_values_are_left_out_and_counted(self, tmp_path: Path) -> None:
        import redis

        from kvist.cluster.discovery.redis import RedisDiscovery

        discovery = RedisDiscovery(self.url, timeout_s=20.0)
        discovery.announce(suite_record("a"), ttl_s=LONG_S)
        with redis.Redis.from_url(self.url) as client:
            client.set("kvist-node/b", b"not a record")
            client.set("kvist/other", b"x")
        assert discovery.members() == [suite_record("a")]
        assert discovery.unreadable == 1
        discovery.close()


def test_killed_server_is_a_tier_error_and_its_return_is_enough() -> None:
    with redis_server() as server:
        from kvist.cluster.discovery.redis import RedisDiscovery

        discovery = RedisDiscovery(f"redis://{HOST}:{server.port}/0", timeout_s=5.0)
        discovery.announce(suite_record("a"), ttl_s=LONG_S)
        server.kill()
        with pytest.raises(TierError):
            discovery.announce(suite_record("a"), ttl_s=LONG_S)
        with pytest.raises(TierError):
            discovery.members()
        server.start()
        assert discovery.members() == []
        discovery.announce(suite_record("a", 2), ttl_s=LONG_S)
        assert discovery.members() == [suite_record("a", 2)]
        discovery.close()


def test_frozen_server_is_a_tier_error_before_long() -> None:
    with redis_server() as server:
        from kvist.cluster.discovery.redis import RedisDiscovery

        discovery = RedisDiscovery(f"redis://{HOST}:{server.port}/0", timeout_s=0.5)
        discovery.announce(suite_record("a"), ttl_s=LONG_S)
        server.freeze()
        with pytest.raises(TierError):
            discovery.members()
        server.thaw()
        discovery.close()
