"""Adapters of real servers, and remote tiers over them, pass the published suites."""

from __future__ import annotations

from pathlib import Path

import pytest
from real import HOST, Server, make_bucket

from kvist.adapters.protocol import StorageAdapter
from kvist.native import digest
from kvist.testing import adapter_suite, tier_suite
from kvist.testing.adapter_suite import AdapterSuite
from kvist.testing.tier_suite import LowerTierSuite
from kvist.tiers.protocol import LowerTier
from kvist.tiers.remote import RemoteTier


class _Redis:
    """The server is emptied before each test."""

    @pytest.fixture(autouse=True)
    def _server(self, redis_service: Server) -> None:
        import redis

        self.url = f"redis://{HOST}:{redis_service.port}/0"
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    def open_redis(self, capacity_bytes: int | None) -> StorageAdapter:
        from kvist.adapters.redis import RedisAdapter

        return RedisAdapter(self.url, capacity_bytes=capacity_bytes, timeout_s=20.0)


class TestRedisAdapter(_Redis, AdapterSuite):
    def open_adapter(
        self, directory: Path, capacity_bytes: int | None = adapter_suite.CAPACITY_BYTES
    ) -> StorageAdapter:
        return self.open_redis(capacity_bytes)


class TestRedisAdapterWithoutCapacity(_Redis, AdapterSuite):
    limits_itself = False

    def open_adapter(self, directory: Path, capacity_bytes: int | None = None) -> StorageAdapter:
        return self.open_redis(None)


class TestRemoteTierOnRedis(_Redis, LowerTierSuite):
    def open_tier(
        self, directory: Path, capacity_bytes: int = tier_suite.CAPACITY_BYTES
    ) -> LowerTier:
        return learned(self.open_redis(capacity_bytes))


class TestRedisClusterAdapter(AdapterSuite):
    limits_itself = False

    @pytest.fixture(autouse=True)
    def _servers(self, cluster_service: list[Server]) -> None:
        from redis.cluster import RedisCluster

        self.port = cluster_service[0].port
        client = RedisCluster(host=HOST, port=self.port)
        client.flushall(target_nodes=RedisCluster.PRIMARIES)
        client.close()

    def open_adapter(self, directory: Path, capacity_bytes: int | None = None) -> StorageAdapter:
        from kvist.adapters.redis import RedisAdapter

        return RedisAdapter(f"redis+cluster://{HOST}:{self.port}", timeout_s=20.0)


class _S3:
    """A bucket of its own for each test."""

    @pytest.fixture(autouse=True)
    def _server(self, s3_service: Server, tmp_path: Path) -> None:
        self.endpoint = f"http://{HOST}:{s3_service.port}"
        self.bucket = "kvist-" + digest(str(tmp_path).encode()).hex()[:20]
        make_bucket(s3_service, self.bucket)

    def open_s3(self, capacity_bytes: int | None) -> StorageAdapter:
        from kvist.adapters.s3 import S3Adapter

        return S3Adapter(
            self.bucket,
            prefix="some/where",
            endpoint=self.endpoint,
            region="us-east-1",
            capacity_bytes=capacity_bytes,
            timeout_s=20.0,
        )


class TestS3Adapter(_S3, AdapterSuite):
    def open_adapter(
        self, directory: Path, capacity_bytes: int | None = adapter_suite.CAPACITY_BYTES
    ) -> StorageAdapter:
        return self.open_s3(capacity_bytes)


class TestRemoteTierOnS3(_S3, LowerTierSuite):
    def open_tier(
        self, directory: Path, capacity_bytes: int = tier_suite.CAPACITY_BYTES
    ) -> LowerTier:
        return learned(self.open_s3(capacity_bytes))


def learned(adapter: StorageAdapter) -> RemoteTier:
    """A remote tier that knows what is there."""
    tier = RemoteTier(adapter, keyspace=bytes(32))
    assert tier.wait_listed(20.0)
    return tier
