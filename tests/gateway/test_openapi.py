"""Schemathesis: whatever the OpenAPI document allows or forbids gets an answer that it names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from gateway_thread import Running, serving
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kvist.gateway import front
from kvist.gateway.ask import Endpoint
from kvist.gateway.openapi import openapi
from kvist.gateway.settings import Settings, Timeouts
from kvist.testing.stub_engine import StubEngine

SCHEMA = schemathesis.openapi.from_dict(openapi("1"))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def gateway(engine: StubEngine) -> Iterator[Running]:
    with serving(engine, settings=Settings(timeouts=Timeouts(health_s=20.0))) as running:
        yield running


def test_document_names_every_path_that_is_served_and_no_other() -> None:
    served = set(re.findall(r'"(/[a-z0-9/.]+)"', inspect.getsource(front)))
    described = {path.partition("/{")[0] for path in openapi("1")["paths"]}
    assert described == served | {endpoint.value for endpoint in Endpoint}


def test_document_is_what_is_served(gateway: Running) -> None:
    assert gateway.ask("/openapi.json")[1] == openapi("1")


@SCHEMA.parametrize()
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_answers_are_those_of_the_document(case: Any, gateway: Running) -> None:
    case.call_and_validate(base_url=f"http://127.0.0.1:{gateway.port}", checks=CHECKS, timeout=20)
