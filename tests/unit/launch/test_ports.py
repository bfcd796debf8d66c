"""Ports of engines: never the same for two hosts of a machine, though servers bind them late."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvist.core.errors import ConfigError
from kvist.launch.ports import Port

FIRST = 18_400
HOST = "127.0.0.1"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Port]]:
    made: list[Port] = []

    def one(first: int = FIRST) -> Port:
        made.append(Port(tmp_path / "ports", HOST, first))
        return made[-1]

    yield one
    for port in made:
        port.release()


def test_two_that_nobody_has_bound_yet_differ(make: Callable[..., Port]) -> None:
    numbers = [make().choose() for _ in range(4)]
    assert len(set(numbers)) == 4
    assert min(numbers) >= FIRST


def test_a_start_again_keeps_the_port(make: Callable[..., Port]) -> None:
    port, other = make(), make()
    first = port.choose()
    assert other.choose() != first
    assert port.choose() == first


def test_a_port_that_a_stranger_took_meanwhile_is_given_up(make: Callable[..., Port]) -> None:
    port = make()
    first = port.choose()
    with socket.create_server((HOST, first)):
        assert port.choose() != first


def test_what_was_given_back_can_be_had(make: Callable[..., Port]) -> None:
    port, other = make(), make()
    first = port.choose()
    port.release()
    port.release()
    assert other.choose() == first


def test_none_left_is_one_line_with_a_remedy(make: Callable[..., Port]) -> None:
    taken = make(65_535)
    taken.choose()
    with pytest.raises(ConfigError, match="no free port from 65535 on; choose another"):
        make(65_535).choose()
