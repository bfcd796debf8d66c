"""Real servers that are killed, freeze, evict, or give back other bytes: a miss, never more."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real import HOST, Server, free_port, make_bucket, redis_cluster, redis_server, s3_server

from kvist.adapters.opening import Limits, open_layered
from kvist.adapters.protocol import NewObject, StorageAdapter, Wanted
from kvist.core.errors import TierError, TierFullError, TierTimeout
from kvist.core.outcome import Outcome
from kvist.testing.tier_suite import suite_block, suite_key, suite_payload
from kvist.tiers.remote import LearnLimits, MissCause, RemoteTier

SIZE = 2_000_000
DEADLINE_S = 2.0
MUCH_LATER_S = 20.0  # no test depends on speed; this tells a deadline from a hang
KEYSPACE = bytes(32)
NAME = "kvist/" + KEYSPACE.hex() + "/"

WRITER = """
import sys
from kvist.adapters.redis import RedisAdapter
from kvist.testing.tier_suite import suite_payload
from kvist.tiers.remote import RemoteTier
tier = RemoteTier(RedisAdapter(sys.argv[1]), keyspace=bytes(32))
for n in range(10_000):
    print(n, flush=True)
    tier.put([suite_payload(n, 2_000_000)])
"""


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that this test may harm."""
    with redis_server() as server:
        yield server


def url_of(server: Server) -> str:
    return f"redis://{HOST}:{server.port}/0"


def open_tier(url: str, *, retries: int = 0, timeout_s: float = DEADLINE_S) -> RemoteTier:
    opened = open_layered(
        url, Limits(timeout_s=timeout_s, retries=retries, failures=100, open_s=0.01)
    )
    return RemoteTier(
        opened.adapter,
        keyspace=KEYSPACE,
        limits=LearnLimits(probe_s=0.05),
        available=opened.breaker.passes,
    )


def read(tier: RemoteTier, i: int) -> bytes | None:
    out = bytearray(SIZE)
    hit = tier.read_into(suite_key(i), memoryview(out)) is Outcome.HIT
    return bytes(out) if hit else None


def right_or_missing(tier: RemoteTier, numbers: range) -> int:
    """How many blocks there are; every one is right. A server that comes back may fail once."""
    hits = 0
    for i in numbers:
        try:
            data = read(tier, i)
        except TierError:
            data = read(tier, i)
        assert data in (None, suite_block(i, SIZE))
        hits += data is not None
    return hits


def test_redis_killed_while_it_is_written_to_is_a_miss(server: Server) -> None:
    tier = open_tier(url_of(server))
    failed = threading.Event()

    def write() -> None:
        try:
            for n in range(10_000):
                tier.put([suite_payload(n, SIZE)])
        except TierError:
            failed.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    while tier.stats().stored < 5:
        time.sleep(0.001)
    server.kill()
    assert failed.wait(MUCH_LATER_S)
    assert tier.contains(suite_key(0))  # it was there a moment ago
    with pytest.raises(TierError):
        read(tier, 0)
    server.start()
    assert right_or_missing(tier, range(tier.stats().stored + 2)) == 0
    assert not tier.contains(suite_key(0))
    tier.put([suite_payload(0, SIZE)])
    assert read(tier, 0) == suite_block(0, SIZE)
    tier.close()


def test_client_killed_in_the_middle_of_writes_leaves_whole_blocks(server: Server) -> None:
    for _ in range(3):
        line = [sys.executable, "-c", WRITER, url_of(server)]
        with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(8):
                process.stdout.readline()
            process.kill()
    tier = open_tier(url_of(server), timeout_s=5.0)
    assert right_or_missing(tier, range(12)) >= 7
    assert MissCause.DAMAGED not in tier.stats().misses_by_cause
    tier.close()


def each_call(tier: RemoteTier) -> list[Callable[[], object]]:
    return [
        lambda: read(tier, 1),
        lambda: tier.put([suite_payload(5, SIZE)]),
        lambda: tier.remove([suite_key(1)]),
        lambda: tier.clear(),
    ]


def check_that_calls_end(tier: RemoteTier, server: Server) -> None:
    tier.put([suite_payload(1, SIZE)])
    server.freeze()
    for call in each_call(tier):
        began_s = time.monotonic()
        with pytest.raises(TierTimeout):
            call()
        assert time.monotonic() - began_s < MUCH_LATER_S
    assert tier.contains_run([suite_key(i) for i in range(50, 60)]) == 0
    server.thaw()
    read(tier, 1)
    tier.close()


def test_redis_that_freezes_is_left_at_the_deadline(server: Server) -> None:
    check_that_calls_end(open_tier(url_of(server)), server)


def test_s3_that_freezes_is_left_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with s3_server() as server:
        make_bucket(server, "frozen")
        url = f"s3://frozen/a?endpoint=http://{HOST}:{server.port}&region=us-east-1"
        check_that_calls_end(open_tier(url, timeout_s=2.0), server)


def test_server_that_refuses_connections_fails_every_call(server: Server) -> None:
    tier = open_tier(url_of(server), retries=2)
    server.kill()
    for call in each_call(tier):
        with pytest.raises(TierError):
            call()
    server.start()
    assert read(tier, 1) is None
    tier.close()


@pytest.mark.parametrize("how", ["cut", "flip", "header", "empty", "other"])
def test_spoilt_values_are_misses_and_make_way(server: Server, how: str) -> None:
    import redis

    tier = open_tier(url_of(server), timeout_s=5.0)
    tier.put([suite_payload(1, SIZE), suite_payload(2, SIZE)])
    name = NAME + suite_key(1).hex()
    with redis.Redis(port=server.port) as client:
        good = bytes(client.get(name))
        client.set(
            name,
            {
                "cut": good[:-4096],
                "flip": good[:900_000] + bytes([good[900_000] ^ 1]) + good[900_001:],
                "header": b"\0" + good[1:],
                "empty": b"",
                "other": bytes(client.get(NAME + suite_key(2).hex())),
            }[how],
        )
        assert read(tier, 1) is None
        assert read(tier, 2) == suite_block(2, SIZE)
        give_up = time.monotonic() + MUCH_LATER_S
        while client.exists(name):
            assert time.monotonic() < give_up
            time.sleep(0.01)
    tier.put([suite_payload(1, SIZE)])
    assert read(tier, 1) == suite_block(1, SIZE)
    tier.close()


def test_blocks_that_the_server_evicts_are_misses() -> None:
    with redis_server("--maxmemory", "40mb", "--maxmemory-policy", "allkeys-lru") as server:
        tier = open_tier(url_of(server), timeout_s=5.0)
        for n in range(40):
            tier.put([suite_payload(n, SIZE)])
        assert tier.contains(suite_key(0))
        there = right_or_missing(tier, range(40))
        assert 0 < there < 40
        assert tier.stats().misses_by_cause == {MissCause.ABSENT: 40 - there}
        tier.close()


def test_server_without_room_is_full_and_no_failing_one() -> None:
    with redis_server("--maxmemory", "20mb", "--maxmemory-policy", "noeviction") as server:
        tier = open_tier(url_of(server), timeout_s=5.0)
        blocks = [suite_payload(n, SIZE) for n in range(40)]
        with pytest.raises(TierFullError):
            tier.put(blocks)
        assert tier.stats().available
        assert read(tier, 0) == suite_block(0, SIZE)
        tier.close()


def test_password_is_asked_for_and_never_shown(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with redis_server("--requirepass", "sesame") as server:
        right = open_tier(f"redis://:sesame@{HOST}:{server.port}/0", timeout_s=5.0)
        right.put([suite_payload(1, SIZE)])
        assert read(right, 1) == suite_block(1, SIZE)
        right.close()
        wrong = open_tier(f"redis://:barley@{HOST}:{server.port}/0")
        with pytest.raises(TierError) as caught:
            read(wrong, 1)
        wrong.close()
        assert "barley" not in str(caught.value) + caplog.text


def all_fail(adapter: StorageAdapter) -> None:
    """Every call is a `TierError`, and nothing else."""
    calls: list[Callable[[], object]] = [
        lambda: adapter.get([Wanted("a/1")]),
        lambda: adapter.put([NewObject("a/1", (memoryview(b"x"),))]),
        lambda: adapter.delete(["a/1"]),
        lambda: adapter.list_page("a/"),
    ]
    for call in calls:
        with pytest.raises(TierError):
            call()


def test_cluster_that_is_away_fails_every_call() -> None:
    """redis-py raises what is no `RedisError` when it finds no node: it went past every layer."""
    pytest.importorskip("redis")
    from kvist.adapters.redis import RedisAdapter

    adapter = RedisAdapter(f"redis+cluster://{HOST}:{free_port()}", timeout_s=DEADLINE_S)
    all_fail(adapter)
    adapter.close()


def test_cluster_that_loses_its_nodes_fails_calls_and_no_more() -> None:
    pytest.importorskip("redis")
    from kvist.adapters.redis import RedisAdapter

    names = [f"a/{n}" for n in range(30)]
    with redis_cluster() as servers:
        adapter = RedisAdapter(f"redis+cluster://{HOST}:{servers[0].port}", timeout_s=DEADLINE_S)
        adapter.put([NewObject(name, (memoryview(b"x"),)) for name in names])
        servers[1].kill()
        failed = 0
        for name in names:
            try:
                adapter.get([Wanted(name)])
            except TierError:
                failed += 1
        assert 0 < failed < len(names)
        for server in servers:
            server.kill()
        all_fail(adapter)
        adapter.close()
