"""Lets the tests of this folder import `gateway_thread`; engines that many tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvist.testing.stub_engine import StubEngine

if (folder := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, folder)


@pytest.fixture(scope="session")
def bytes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer's folder: a token a character."""
    from gateway_thread import byte_tokenizer

    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def engine() -> Iterator[StubEngine]:
    """An engine that answers at once."""
    with StubEngine() as process:
        yield process
