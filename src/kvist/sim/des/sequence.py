"""One request on its way through the cluster: what is done of it, and its token gaps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum

from kvist.core.hints import Hints
from kvist.core.keys import Key
from kvist.sim.traces import Request

_LONGEST_RATIO = 0.1  # of token gaps that count for TBT


class State(Enum):
    """Where a request is on its node."""

    WAITING = "waiting"
    LOADING = "loading"  # in the queue, with HBM taken and bytes under way
    READY = "ready"  # in the queue, with HBM taken and nothing under way
    PREFILL = "prefill"
    HANDOVER = "handover"
    DECODE = "decode"
    DONE = "done"


class Sequence:
    """A request's state. The engine, the store and the cluster change the parts that are theirs.

    `prompt_tokens` grows when a request starts anew after some of its output: that is part of the
    prompt then. `keys` names the full blocks of the request's own prompt.
    """

    __slots__ = (
        "arrival_s",
        "assumed_blocks",
        "cached_tokens",
        "computed_tokens",
        "decode_node",
        "first_gap",
        "first_token_s",
        "gaps",
        "generated",
        "held_blocks",
        "hints",
        "keys",
        "last_token_s",
        "load",
        "log_start",
        "nameless_tokens",
        "node",
        "number",
        "output_tokens",
        "planned",
        "predicted_s",
        "prompt_tokens",
        "request",
        "retries",
        "state",
    )

    def __init__(
        self, number: int, request: Request, arrival_s: float, block_tokens: int, default_out: int
    ) -> None:
        self.number = number
        self.request = request
        self.arrival_s = arrival_s
        self.keys: tuple[Key, ...] = request.keys[: request.input_tokens // block_tokens]
        self.hints = Hints(request.finish, request.output_tokens)
        self.prompt_tokens = max(1, request.input_tokens)
        self.output_tokens = max(1, request.output_tokens or default_out)
        self.generated = 0
        self.retries = 0
        self.cached_tokens: dict[str, int] = {}  # at the first prefill, by tier
        self.gaps: list[tuple[float, int]] = []  # (gap_s, how many in a row)
        self.first_token_s = math.inf
        self.last_token_s = math.inf
        self.first_gap = math.nan
        self.log_start = -1  # in the engine's log; -1 until the first step after joining
        self.node = -1
        self.decode_node = -1
        self.predicted_s = 0.0  # prefill, as the queue counts it
        self.load: object | None = None  # the loader's
        self.restart()

    def restart(self) -> None:
        """Forgets what an engine held: it was preempted, or its node was lost."""
        self.prompt_tokens = max(1, self.request.input_tokens) + self.generated
        self.state = State.WAITING
        self.held_blocks = 0  # of `keys`, with a reference in HBM
        self.nameless_tokens = 0
        self.computed_tokens = 0
        self.planned = False
        self.assumed_blocks = 0  # of a load, until it is over
        self.load = None

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV exists once the prompt was computed."""
        return max(1, self.request.input_tokens) + self.generated

    @property
    def left_tokens(self) -> int:
        """Output tokens that are still to come."""
        return self.output_tokens - self.generated

    def first_token_received(self, now_s: float) -> None:
        """Says that the first token came to the user only now, with the KV; later ones stay."""
        if self.generated == 1:
            self.first_token_s = self.last_token_s = now_s

    def token_at(self, now_s: float) -> None:
        """Counts one token that came outside a decode step."""
        if not self.generated:
            self.first_token_s = now_s
        else:
            self.gaps.append((now_s - self.last_token_s, 1))
        self.generated += 1
        self.last_token_s = now_s


def longest_gaps_mean_s(gaps: Iterable[tuple[float, int]]) -> float:
    """Mean of the longest 10 % (at least one) of gaps given as (seconds, how many); 0 for none."""
    ordered = sorted(gaps, reverse=True)
    total = sum(count for _, count in ordered)
    if not total:
        return 0.0
    wanted = left = max(1, math.ceil(total * _LONGEST_RATIO - 1e-9))
    seconds = 0.0
    for gap_s, count in ordered:
        used = min(count, left)
        seconds += gap_s * used
        left -= used
        if not left:
            break
    return seconds / wanted
