"""How much a tenant may ask: buckets that fill with time, and a count of what is in flight.

Theory of operation. Several gateways share the limits by telling each other what their tenants
used: each keeps every bucket for all gateways together and takes out of it what the others say they
let in. What is let in at several of them before they have heard of each other is let in by each,
and leaves the bucket overdrawn: it is taken from the time after, so that a limit is exceeded by no
more than what the others let in while a word was on its way, and no minute later gives more. `used`
counts from the start of a gateway, so a lost word loses nothing. A tenant of which a gateway that
nobody knows speaks for the first time comes with how much is left: whoever believes in more takes
that over. A gateway that is silent for `expire_s` is forgotten, with what it has in flight. Words
of many tenants leave out those that did nothing for so long, but for a whole one now and then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import msgspec

from kvist.gateway.faults import Fault

EVERYBODY = "*"
_MIN_S = 60.0
_BUSY_S = 1.0
_EXPIRE_S = 10.0
Rates = int | Mapping[str, int]


class Used(msgspec.Struct, frozen=True, gc=False):
    """What one tenant used at one gateway.

    Attributes:
        requests, tokens: since the gateway's start.
        in_flight: requests now.
        requests_left, tokens_left: in the buckets, as this gateway knows; None: no limit.
    """

    requests: float
    tokens: float
    in_flight: int
    requests_left: float | None = None
    tokens_left: float | None = None


_NOTHING = Used(0.0, 0.0, 0)


class Bucket:
    """So many units a minute, a minute's worth of which may come at once.

    It may be overdrawn: what an answer takes too much, the next request waits for.
    """

    def __init__(self, per_min: int, now_s: float) -> None:
        self._per_s, self._most = per_min / _MIN_S, float(per_min)
        self._left, self._at_s = float(per_min), now_s

    def wait_s(self, units: float, now_s: float) -> float:
        """Seconds until `units` are there; more than the bucket holds count as a full one."""
        return max(0.0, (min(units, self._most) - self.left(now_s)) / self._per_s)

    def take(self, units: float, now_s: float) -> None:
        """Takes `units`, present or not."""
        self._left, self._at_s = self.left(now_s) - units, now_s

    def lower(self, left: float, now_s: float) -> None:
        """There is no more in it than `left`."""
        self._left, self._at_s = min(left, self.left(now_s)), now_s

    def left(self, now_s: float) -> float:
        """Units that are in it; below 0 if it is overdrawn."""
        return min(self._most, self._left + (now_s - self._at_s) * self._per_s)


@dataclass(slots=True)
class _Account:
    requests: Bucket | None
    tokens: Bucket | None
    most_in_flight: int
    changed_s: float
    in_flight: int = 0
    requests_taken: float = 0.0  # at this gateway
    tokens_taken: float = 0.0

    @property
    def is_limited(self) -> bool:
        return bool(self.requests or self.tokens or self.most_in_flight)

    def use(self, requests: float, tokens: float, now_s: float) -> None:
        """It was used here."""
        self.take(requests, tokens, now_s)
        self.requests_taken += requests
        self.tokens_taken += tokens
        self.changed_s = now_s

    def take(self, requests: float, tokens: float, now_s: float) -> None:
        """Takes out of the buckets, whoever used it."""
        if self.requests is not None:
            self.requests.take(requests, now_s)
        if self.tokens is not None:
            self.tokens.take(tokens, now_s)

    def lower(self, used: Used, now_s: float) -> None:
        if self.requests is not None and used.requests_left is not None:
            self.requests.lower(used.requests_left, now_s)
        if self.tokens is not None and used.tokens_left is not None:
            self.tokens.lower(used.tokens_left, now_s)


@dataclass(slots=True)
class _Other:
    """Another gateway: what its tenants used, and when it said so.

    `is_known`: it has named all its tenants, so one that it names anew used nothing before.
    """

    used: dict[str, Used] = field(default_factory=dict)
    at_s: float = 0.0
    is_known: bool = False


class TenantLimits:
    """The accounts of all tenants. Not thread-safe: the gateway's loop is its only caller."""

    def __init__(
        self,
        *,
        requests_per_min: Rates = 0,
        tokens_per_min: Rates = 0,
        in_flight: Rates = 0,
        expire_s: float = _EXPIRE_S,
    ) -> None:
        """A number for every tenant, or numbers by name, `*` being all others; 0 is no limit.

        `expire_s`: of silence, after which another gateway is forgotten.
        """
        self._rates = (requests_per_min, tokens_per_min, in_flight)
        self._expire_s = expire_s
        self._accounts: dict[str, _Account] = {}
        self._others: dict[str, _Other] = {}

    def admit(self, tenant: str, prompt_tokens: int, now_s: float) -> None:
        """Lets a request in and takes what is known of it; `leave` must follow.

        Raises:
            Fault: 429, a limit is reached; nothing was taken.
        """
        account = self._account(tenant, now_s)
        if account.most_in_flight and self._in_flight(tenant, account) >= account.most_in_flight:
            raise _exceeded("requests in flight", _BUSY_S)
        for bucket, units, what in (
            (account.requests, 1, "requests a minute"),
            (account.tokens, prompt_tokens, "tokens a minute"),
        ):
            if bucket is not None and (wait_s := bucket.wait_s(units, now_s)) > 0:
                raise _exceeded(what, wait_s)
        account.use(1, prompt_tokens, now_s)
        account.in_flight += 1

    def leave(self, tenant: str, output_tokens: int, now_s: float) -> None:
        """A request that was let in is over and took so many tokens more."""
        account = self._account(tenant, now_s)
        account.in_flight -= 1
        account.use(0, output_tokens, now_s)

    @property
    def tenants(self) -> int:
        """How many it knows."""
        return len(self._accounts)

    def used(self, now_s: float, *, whole: bool = True) -> dict[str, Used]:
        """What tenants with limits used here, for other gateways; not `whole`: those of late."""
        since_s = float("-inf") if whole else now_s - self._expire_s
        return {
            tenant: Used(
                account.requests_taken,
                account.tokens_taken,
                account.in_flight,
                None if account.requests is None else account.requests.left(now_s),
                None if account.tokens is None else account.tokens.left(now_s),
            )
            for tenant, account in self._accounts.items()
            if account.is_limited and (account.in_flight or account.changed_s >= since_s)
        }

    def hear(
        self, gateway: str, used: Mapping[str, Used], now_s: float, *, whole: bool = True
    ) -> None:
        """Takes in what tenants used at another gateway; `whole`: it names all that it has."""
        other = self._others.setdefault(gateway, _Other())
        for tenant, now in used.items():
            account = self._account(tenant, now_s)
            before = other.used.get(tenant, _NOTHING if other.is_known else None)
            if before is None:
                account.lower(now, now_s)
            else:
                account.take(now.requests - before.requests, now.tokens - before.tokens, now_s)
        other.used.update(used)
        other.at_s, other.is_known = now_s, other.is_known or whole

    def forget_silent(self, now_s: float) -> None:
        """Drops gateways that have not been heard for `expire_s`."""
        for name in [n for n, o in self._others.items() if now_s - o.at_s > self._expire_s]:
            del self._others[name]

    def _in_flight(self, tenant: str, account: _Account) -> int:
        others = (other.used.get(tenant, _NOTHING).in_flight for other in self._others.values())
        return account.in_flight + sum(others)

    def _account(self, tenant: str, now_s: float) -> _Account:
        found = self._accounts.get(tenant)
        if found is None:
            requests, tokens, in_flight = (_rate(rates, tenant) for rates in self._rates)
            found = self._accounts[tenant] = _Account(
                Bucket(requests, now_s) if requests else None,
                Bucket(tokens, now_s) if tokens else None,
                in_flight,
                now_s,
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
        refused="limit",
    )
