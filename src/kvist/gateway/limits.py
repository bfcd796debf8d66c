"""How much a tenant may ask: buckets that fill with time, and a count of what is in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from kvist.gateway.faults import Fault

EVERYBODY = "*"
_MIN_S = 60.0
_BUSY_S = 1.0
Rates = int | Mapping[str, int]


class Bucket:
    """So many units a minute, a minute's worth of which may come at once.

    It may be overdrawn: what an answer takes too much, the next request waits for.
    """

    def __init__(self, per_min: int, now_s: float) -> None:
        self._per_s, self._most = per_min / _MIN_S, float(per_min)
        self._left, self._at_s = float(per_min), now_s

    def wait_s(self, units: float, now_s: float) -> float:
        """Seconds until `units` are there; more than the bucket holds count as a full one."""
        left = self._now(now_s)
        return max(0.0, (min(units, self._most) - left) / self._per_s)

    def take(self, units: float, now_s: float) -> None:
        """Takes `units`, present or not."""
        self._left, self._at_s = self._now(now_s) - units, now_s

    def _now(self, now_s: float) -> float:
        return min(self._most, self._left + (now_s - self._at_s) * self._per_s)


@dataclass(slots=True)
class _Account:
    requests: Bucket | None
    tokens: Bucket | None
    most_in_flight: int
    in_flight: int = 0


class TenantLimits:
    """The accounts of all tenants. Not thread-safe: the gateway's loop is its only caller."""

    def __init__(
        self, *, requests_per_min: Rates = 0, tokens_per_min: Rates = 0, in_flight: Rates = 0
    ) -> None:
        """A number for every tenant, or numbers by name, `*` being all others; 0 is no limit."""
        self._rates = (requests_per_min, tokens_per_min, in_flight)
        self._accounts: dict[str, _Account] = {}

    def admit(self, tenant: str, prompt_tokens: int, now_s: float) -> None:
        """Lets a request in and takes what is known of it; `leave` must follow.

        Raises:
            Fault: 429, a limit is reached; nothing was taken.
        """
        account = self._account(tenant, now_s)
        if account.most_in_flight and account.in_flight >= account.most_in_flight:
            raise _exceeded("requests in flight", _BUSY_S)
        for bucket, units, what in (
            (account.requests, 1, "requests a minute"),
            (account.tokens, prompt_tokens, "tokens a minute"),
        ):
            if bucket is not None and (wait_s := bucket.wait_s(units, now_s)) > 0:
                raise _exceeded(what, wait_s)
        if account.requests is not None:
            account.requests.take(1, now_s)
        if account.tokens is not None:
            account.tokens.take(prompt_tokens, now_s)
        account.in_flight += 1

    def leave(self, tenant: str, output_tokens: int, now_s: float) -> None:
        """A request that was let in is over and took so many tokens more."""
        account = self._account(tenant, now_s)
        account.in_flight -= 1
        if account.tokens is not None:
            account.tokens.take(output_tokens, now_s)

    def _account(self, tenant: str, now_s: float) -> _Account:
        found = self._accounts.get(tenant)
        if found is None:
            requests, tokens, in_flight = (_rate(rates, tenant) for rates in self._rates)
            found = self._accounts[tenant] = _Account(
                Bucket(requests, now_s) if requests else None,
                Bucket(tokens, now_s) if tokens else None,
                in_flight,
            )
        return found


def _rate(rates: Rates, tenant: str) -> int:
    if isinstance(rates, int):
        return rates
    return rates.get(tenant, rates.get(EVERYBODY, 0))


def _exceeded(what: str, wait_s: float) -> Fault:
    return Fault(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"this key's limit of {what} is reached",
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
    )
