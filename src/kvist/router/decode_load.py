"""How long a decode step of a pool takes now, and at a later time.

At a later time, a request that decodes now is still there with the chance that its decode, being as
old as it is, lasts that much longer; one that is in prefill has come if its first token is
predicted before, and is still there with the chance that a decode lasts from then on. Chances are
those of the decode times seen so far, of its tenant and endpoint where they are known.

Source: Mooncake (FAST'25), section on overload: it takes one uniform decode time; this its
distribution, learned online.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvist.router.replicas import Replica


def is_idle(pool: Sequence[Replica]) -> bool:
    """Whether nobody decodes there, or is to."""
    return not any(r.contexts or r.others.load(r.name).contexts for r in pool)


def step_now_s(replica: Replica) -> float:
    """A step of one replica with those that decode now."""
    return _step_s(replica, replica.contexts.live, replica.contexts.live_tokens)


def pool_step_now_s(pool: Sequence[Replica], more_tokens: int) -> float:
    """Mean over a pool of the step now, with one more request spread over all."""
    share = 1 / len(pool)
    return share * sum(
        _step_s(r, r.contexts.live + share, r.contexts.live_tokens + share * more_tokens)
        for r in pool
    )


def pool_step_at_s(pool: Sequence[Replica], more_tokens: int, at_s: float, now_s: float) -> float:
    """The same at `at_s`, as far as it can be foreseen at `now_s`."""
    share = 1 / len(pool)
    total_s = 0.0
    for replica in pool:
        batch, tokens = share, share * more_tokens
        for context in replica.contexts:
            if context.live:
                chance = context.times.outlives(max(0.0, now_s - context.since_s), at_s - now_s)
            elif context.since_s <= at_s:
                chance = context.times.survival(at_s - max(now_s, context.since_s))
            else:
                continue
            batch += chance
            tokens += chance * context.tokens
        total_s += _step_s(replica, batch, tokens)
    return share * total_s


def _step_s(replica: Replica, batch: float, context_tokens: float) -> float:
    """A step with these of this gateway; others' requests are taken to stay as they are."""
    theirs = replica.others.load(replica.name)
    batch, context_tokens = batch + theirs.contexts, context_tokens + theirs.context_tokens
    times = replica.speeds.decode.coefficients
    return times.d0_s + times.d1_s * batch + times.d2_s * context_tokens
