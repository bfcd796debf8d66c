"""Whether one replica computes a prompt and another goes on with it: which two, and by which rule.

A replica that decodes can compute prompts as well, and then no KV has to cross. Against that stands
what it costs those that decode there: each of them is held up while a prompt is computed. So the
rule `cost` charges a second of prefill on a decode replica once for the request itself and once for
each that is there, a second on a prefill replica once for each that waits there (as the policy
`kvist` does), and adds to the latter what it takes to hand over the KV that the decode replica
lacks. How long that takes is learned: from the prompt's being computed to the first token.

Source: NVIDIA Dynamo, conditional disaggregation; its rule of 2025 is `length`: a prompt goes to a
prefill replica if more of it than a limit is not cached where it decodes, and few wait there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from kvist.cost.learner import LinearTimes
from kvist.router.candidates import Candidate
from kvist.router.choice import Selected
from kvist.router.policies.protocol import Policy
from kvist.router.protocol import Ask

_PASS_TOKENS = 100  # handing over nothing is believed to take as long as so many tokens


class Rule(Enum):
    """When a prompt is computed by a prefill replica, if any is open."""

    COST = "cost"
    LENGTH = "length"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a router with prefill replicas decides; `length_tokens` and `queued` are of `LENGTH`.

    Attributes:
        rule: see `Rule`.
        length_tokens: a prompt of which no more than that is to be computed is not split.
        queued: nor is any if so many wait at the prefill replica.
        tokens_per_s: in which KV is believed to be handed over until that was seen.
    """

    rule: Rule = Rule.COST
    length_tokens: int = 2048
    queued: int = 16
    tokens_per_s: float = 50_000.0


class HandoverTimes:
    """Seconds from a computed prompt to a first token elsewhere, learned. One owner."""

    __slots__ = ("_times",)

    def __init__(self, tokens_per_s: float) -> None:
        self._times = LinearTimes((_PASS_TOKENS / tokens_per_s, 1 / tokens_per_s))

    def predict_s(self, tokens: int) -> float:
        """Of the KV of `tokens`."""
        return self._times.predict_s((1.0, float(tokens)))

    def observe(self, tokens: int, seconds: float) -> None:
        """It took `seconds`."""
        self._times.observe((1.0, float(tokens)), max(0.0, seconds))


def place(
    policy: Policy,
    ask: Ask,
    candidates: Sequence[Candidate],
    how: Splitting,
    times: HandoverTimes,
) -> Selected | None:
    """The replicas for a request; None where none goes on with a prompt.

    Prefill replicas serve no request alone, not even where no other is open.
    """
    whole = [c for c in candidates if c.role != "prefill"]
    prefills = [c for c in candidates if c.role == "prefill"]
    if not whole:
        return None
    spared = _spared(ask, prefills, how)
    if not spared and how.rule is Rule.ALWAYS:
        return _told(_there(policy, ask, prefills, whole, times), "remote", "always")
    here = _here(policy, ask, policy.pick(ask, whole))
    if spared:
        return _told(here, "local", spared)
    if how.rule is Rule.LENGTH:
        return _by_length(policy, ask, prefills, here, how, times)
    there = _there(policy, ask, prefills, whole, times)
    held_up = 1 + here.decode.load().requests
    here_s = here.queue_s + held_up * here.serve_s
    there_s = there.queue_s + (1 + there.prefill.load().waiting) * there.serve_s + there.handover_s
    return (
        _told(there, "remote", "cheaper") if there_s < here_s else _told(here, "local", "cheaper")
    )


def _by_length(
    policy: Policy,
    ask: Ask,
    prefills: Sequence[Candidate],
    here: Selected,
    how: Splitting,
    times: HandoverTimes,
) -> Selected:
    if ask.prompt_tokens - here.reuse.own_tokens <= how.length_tokens:
        return _told(here, "local", "short")
    there = _there(policy, ask, prefills, [here.decode], times)
    if there.prefill.load().waiting >= how.queued:
        return _told(here, "local", "queue")
    return _told(there, "remote", "long")


def _spared(ask: Ask, prefills: Sequence[Candidate], how: Splitting) -> str:
    """Why no split is thought of; empty if it is."""
    if ask.undivided:
        return "undivided"
    if not prefills:
        return "no-prefill"
    return "never" if how.rule is Rule.NEVER else ""


def _here(policy: Policy, ask: Ask, chosen: Candidate) -> Selected:
    reuse = policy.reuse(chosen)
    return Selected(chosen, chosen, reuse, chosen.queue_s(), chosen.serve_s(reuse))


def _there(
    policy: Policy,
    ask: Ask,
    prefills: Sequence[Candidate],
    whole: Sequence[Candidate],
    times: HandoverTimes,
) -> Selected:
    chosen, decode = policy.pick(ask, prefills), policy.pick_decode(ask, whole)
    there = replace(_here(policy, ask, chosen), decode=decode)
    lacking = ask.prompt_tokens - min(ask.prompt_tokens, decode.prefix().own_tokens)
    return replace(there, lacking_tokens=lacking, handover_s=times.predict_s(lacking))


def _told(selected: Selected, where: str, why: str) -> Selected:
    return replace(selected, split=f"{where}: {why}")
