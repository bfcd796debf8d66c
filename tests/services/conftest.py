"""Lets the tests of this folder import `real`; one server of a kind for all tests of a worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if (folder := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, folder)

from real import Server, redis_cluster, redis_server, s3_server


@pytest.fixture(scope="session")
def redis_service() -> Iterator[Server]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="session")
def cluster_service() -> Iterator[list[Server]]:
    with redis_cluster() as servers:
        yield servers


@pytest.fixture(scope="session")
def s3_service() -> Iterator[Server]:
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "test"))
    with s3_server() as server:
        yield server
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
