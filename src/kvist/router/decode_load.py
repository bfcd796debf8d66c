"""How long a decode step of a replica takes now, and at a later time.

At a later time, a request that decodes now is still there with the chance that its decode, being as
old as it is, lasts that much longer; one that is in prefill has come if its first token is
predicted before, and is still there with the chance that a decode lasts from then on. Chances are
those of the decode times seen so far, of its tenant and endpoint where they are known. A request
that comes later than most is overtaken by some that are not booked yet: in a second come as many as
decode at a time, over the mean time of a decode (Little's law), and what is booked are the first.

Source: Mooncake (arXiv 2407.00079), section 7.4. It spreads what is in prefill over all decode
instances and takes one uniform decode time; here each request counts where it is booked, with the
distribution of decode times, learned online.

A step that nobody has timed is no ground to refuse anything. Where speeds were guessed, a batch is
foreseen up to `REACH` times the largest whose step was timed, as if no more decoded, and not at all
before some were. Engines decide how many decode at a time; what is booked says only how many there
are, and many of these may wait for something else than a step.
"""

from __future__ import annotations

import math
from itertools import islice

from kvist.cost.learner import WARM_UP
from kvist.router.replicas import Replica

REACH = 4.0
LOOKED_AT = 1024


def is_idle(replica: Replica) -> bool:
    """Whether nobody decodes there, or is to."""
    return not replica.contexts and not replica.others.load(replica.name).contexts


def step_now_s(replica: Replica, more: int = 0, more_tokens: int = 0) -> float:
    """A step with those that decode now, and `more` requests of `more_tokens` in all."""
    contexts = replica.contexts
    return _step_s(replica, contexts.live + more, contexts.live_tokens + more_tokens)


def step_at_s(replica: Replica, more_tokens: int, at_s: float, now_s: float) -> float:
    """A step at `at_s` with one more request, as far as it can be foreseen at `now_s`.

    Of more than `LOOKED_AT` contexts some stand for all: a request is not to wait for ten thousand
    others to be thought of.
    """
    contexts = replica.contexts
    if not contexts or not _foreseeable(replica):
        return _step_s(replica, 1.0, float(more_tokens))
    batch, tokens, lasting_s, seen = 1.0, float(more_tokens), 0.0, 0
    each = 1 + (len(contexts) - 1) // LOOKED_AT
    for context in islice(contexts, 0, None, each):
        seen += 1
        lasting_s += context.times.mean
        if context.live:
            chance = context.times.outlives(max(0.0, now_s - context.since_s), at_s - now_s)
        elif context.since_s <= at_s:
            chance = context.times.survival(at_s - max(now_s, context.since_s))
        else:
            continue
        batch += each * chance
        tokens += each * chance * context.tokens
    unseen = _overtaking(replica, at_s - now_s, lasting_s / seen)
    return _step_s(replica, batch + unseen, tokens + unseen * contexts.tokens / len(contexts))


def _overtaking(replica: Replica, lag_s: float, mean_s: float) -> float:
    """Requests that will be booked and begin to decode within `lag_s`; decodes last `mean_s`."""
    contexts = replica.contexts
    came = contexts.live * lag_s / mean_s if mean_s else 0.0
    return max(0.0, came - contexts.expected)


def _foreseeable(replica: Replica) -> float:
    """The largest batch of which a step can be foreseen; 0 where none can."""
    speeds = replica.speeds
    if not speeds.guessed:
        return math.inf
    return REACH * replica.contexts.timed if speeds.decode.observed >= WARM_UP else 0.0


def _step_s(replica: Replica, batch: float, context_tokens: float) -> float:
    """A step with these of this gateway; others' requests are taken to stay as they are."""
    theirs = replica.others.load(replica.name)
    batch, context_tokens = batch + theirs.contexts, context_tokens + theirs.context_tokens
    most = _foreseeable(replica)
    if not most:
        return 0.0
    if batch > most:
        batch, context_tokens = most, context_tokens * most / batch
    times = replica.speeds.decode.coefficients
    return times.d0_s + times.d1_s * batch + times.d2_s * context_tokens
