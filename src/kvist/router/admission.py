"""Whether a request is served at all, judged at the door and again before it decodes.

Three rules of one shape: the load of prefill is the predicted TTFT over its limit, that of decode
the predicted step over its limit, and a request is refused where one is above 1. They differ in
when decode is looked at.

* `baseline`: only when the prompt was computed and its KV is to join a decode replica. What is
  refused then was computed for nothing.
* `early`: also at the door, as decode is now. Between the door and the decode lies a prefill, so
  decode looks idle while much is on its way, everything is let in, then nothing: prefill and decode
  swing in opposite phase.
* `predictive`: at the door, as decode will be when the request comes there.

What an idle replica cannot do within a limit is served all the same: asking again would not help.

Source: Mooncake (arXiv 2407.00079), section 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvist.router.decode_load import is_idle, step_at_s, step_now_s
from kvist.router.lengths import Groups
from kvist.router.protocol import Ask, Refused
from kvist.router.replicas import Replica

_AIM_RATIO = 0.95  # of each limit: what is foreseen errs, and a miss is worth nothing
_SPARED_RATIO = 0.8  # for requests of low priority
_OVERDRAWN_RATIO = 1.5  # for those of high priority
_LEAST_RETRY_S, _MOST_RETRY_S = 1.0, 60.0


class Rule(Enum):
    """When decode load is looked at; `none` refuses nothing but what misses its own deadline."""

    NONE = "none"
    BASELINE = "baseline"
    EARLY = "early"
    PREDICTIVE = "predictive"


@dataclass(frozen=True, slots=True)
class Limits:
    """What is promised: seconds to the first token, seconds of a decode step."""

    ttft_s: float
    tbt_s: float


class Admission:
    """One rule with its limits."""

    def __init__(self, rule: Rule, limits: Limits, decode_times: Groups) -> None:
        """`decode_times` are seconds from first token to end; whoever sees ends adds to them."""
        self.rule = rule
        self._limits = limits
        self._times = decode_times

    def at_door(
        self, ask: Ask, queue_s: float, serve_s: float, decode: Replica, now_s: float
    ) -> Refused | None:
        """Judges a request by its predicted TTFT and the replica on which it would decode."""
        late = self.in_time(ask, queue_s, serve_s, now_s)
        if late is not None or self._spares(ask):
            return late
        if self.rule is Rule.BASELINE or is_idle(decode):
            return None
        tokens, ttft_s = ask.prompt_tokens, queue_s + serve_s
        if self.rule is Rule.EARLY:
            step_s = step_now_s(decode, 1, tokens)
        else:
            step_s = step_at_s(decode, tokens, now_s + ttft_s, now_s)
        return self._too_slow(ask, step_s)

    def in_time(self, ask: Ask, queue_s: float, serve_s: float, now_s: float) -> Refused | None:
        """Judges a request by its predicted TTFT alone, with what it has waited already."""
        ttft_s = queue_s + serve_s
        if ask.deadline_s is not None and now_s + ttft_s > ask.deadline_s:
            return Refused("deadline", _bounded_s(now_s + ttft_s - ask.deadline_s))
        if self._spares(ask):
            return None
        limit_s = share_of_limits(ask.priority) * self._limits.ttft_s
        late_s = ask.waited_s + ttft_s - limit_s
        if late_s > 0 and (queue_s or serve_s <= limit_s):
            return Refused("ttft", _bounded_s(late_s))
        return None

    def before_decode(self, ask: Ask, replica: Replica) -> Refused | None:
        """Judges a request whose prompt was computed, and which decodes on `replica` from now."""
        if self._spares(ask) or replica.contexts.live <= 1:
            return None
        return self._too_slow(ask, step_now_s(replica))

    def _spares(self, ask: Ask) -> bool:
        """Whether no limit is held against a request."""
        return self.rule is Rule.NONE or ask.admitted or bool(ask.exclude)

    def _too_slow(self, ask: Ask, step_s: float) -> Refused | None:
        if step_s <= share_of_limits(ask.priority) * self._limits.tbt_s:
            return None
        return Refused("tbt", _bounded_s(self._times.of(ask.tenant, ask.endpoint).quantile(0.5)))


def share_of_limits(priority: int) -> float:
    """The share of each limit up to which requests of a priority are served."""
    if priority < 0:
        return _SPARED_RATIO
    return _OVERDRAWN_RATIO if priority > 0 else _AIM_RATIO


def _bounded_s(seconds: float) -> float:
    return min(_MOST_RETRY_S, max(_LEAST_RETRY_S, seconds))
