"""What a client is told with a fault."""

from __future__ import annotations

from http import HTTPStatus

import pytest

from kvist.gateway.faults import Fault


@pytest.mark.parametrize(
    ("after_s", "said"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.2, "2"), (2.5, "3"), (60.0, "60")]
)
def test_who_comes_when_told_to_does_not_come_too_early(after_s: float, said: str) -> None:
    """Seconds were rounded: a client that came back after 1 s was refused for another 0.4."""
    fault = Fault(HTTPStatus.TOO_MANY_REQUESTS, "busy", retry_after_s=after_s)
    assert fault.headers()["Retry-After"] == said


def test_only_what_may_be_asked_again_says_when() -> None:
    assert "Retry-After" not in Fault(HTTPStatus.BAD_REQUEST, "no").headers()
