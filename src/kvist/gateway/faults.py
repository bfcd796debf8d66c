"""Why a request is not served, said as OpenAI's API says it."""

from __future__ import annotations

import math
from http import HTTPStatus

import msgspec

from kvist.core.errors import KvistError
from kvist.router.protocol import Refused

_MOST_CHARS = 500


class Detail(msgspec.Struct, frozen=True):
    """What OpenAI's clients read of a fault. `code`: a word of ours, or an engine's number."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class FaultBody(msgspec.Struct, frozen=True):
    """The body of every answer that is no success."""

    error: Detail


class Fault(KvistError):
    """A request that ends in a status other than 200.

    Attributes:
        status: of HTTP.
        code: a word that programs compare.
        param: the field that is at fault, or None.
        retry_after_s: when asking again may help, or None.
        allow: the methods that are meant, where another was used.
        refused: why a request is not served now that another time would be, in a word; or empty.
    """

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        allow: str = "",
        refused: str = "",
    ) -> None:
        self.status, self.code, self.param = status, code, param
        self.retry_after_s, self.allow, self.refused = retry_after_s, allow, refused
        super().__init__(message[:_MOST_CHARS])

    def body(self) -> bytes:
        """JSON."""
        return msgspec.json.encode(FaultBody(self._detail()))

    def event(self) -> bytes:
        """The same as an event of a stream that has begun."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> dict[str, str]:
        """Headers that belong to it."""
        found = {"Content-Type": "application/json"}
        if self.retry_after_s is not None:
            found["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.allow:
            found["Allow"] = self.allow
        if self.status is HTTPStatus.UNAUTHORIZED:
            found["WWW-Authenticate"] = "Bearer"
        return found

    def _detail(self) -> Detail:
        kind = {
            HTTPStatus.UNAUTHORIZED: "authentication_error",
            HTTPStatus.FORBIDDEN: "permission_error",
            HTTPStatus.NOT_FOUND: "not_found_error",
            HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
        }.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return Detail(str(self), kind, self.param, self.code)


def unmet(message: str, retry_after_s: float | None = None, *, refused: str = "replicas") -> Fault:
    """No replica could serve it."""
    return Fault(
        HTTPStatus.SERVICE_UNAVAILABLE,
        message,
        code="unavailable",
        retry_after_s=retry_after_s,
        refused=refused,
    )


def overloaded(refused: Refused) -> Fault:
    """The router, or the queue before it, has refused a request."""
    return Fault(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"the engines are too busy to serve it in time ({refused.reason})",
        code="overloaded",
        retry_after_s=refused.retry_after_s,
        refused=refused.reason,
    )
