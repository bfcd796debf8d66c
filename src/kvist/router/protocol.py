"""What a gateway asks of a router: values that cross the boundary, and the Protocol itself.

A router decides at once, does no I/O and reads no clock: every call carries `now_s`, seconds of any
monotonic clock. What it chose stays booked until `finish`, so that two requests never see the same
idle replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvist.core.keys import Key


@dataclass(frozen=True, slots=True)
class Ask:
    """What a gateway knows of a request.

    Attributes:
        request: its id, for logs.
        keys: of the prompt's full blocks, from the root; LoRA and tenant's salt are in them.
        prompt_tokens: length of the prompt.
        max_tokens: most tokens of output that were asked for; None for no limit.
        tenant: whose request; for fairness and for learned output lengths.
        endpoint: API path; for learned output lengths.
        model: name of the model; a router serves one.
        lora: adapter, or empty.
        session: requests of one session go to one replica where that costs little.
        priority: below 0 is refused first under load, above 0 last.
        deadline_s: monotonic time by which the first token is worth something.
        exclude: replicas that failed this request; it is not judged by admission again.
        admitted: whether it was let in before and goes on elsewhere.
        undivided: no other replica than the one that answers may compute its prompt.
        streams: its first token is seen when it comes; else nothing is before it is over.
        waited_s: that it waited at a gateway before it may go to a replica.
    """

    request: str
    keys: tuple[Key, ...]
    prompt_tokens: int
    max_tokens: int | None = None
    tenant: str = ""
    endpoint: str = ""
    model: str = ""
    lora: str = ""
    session: str = ""
    priority: int = 0
    deadline_s: float | None = None
    exclude: frozenset[str] = frozenset()
    admitted: bool = False
    undivided: bool = False
    streams: bool = True
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Need:
    """What a prompt takes of the replica that would be through with it first, were it idle.

    Attributes:
        new_tokens: to compute.
        serve_s: predicted seconds to load and compute.
    """

    new_tokens: int
    serve_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes; booked until `finish`.

    Attributes:
        replica: that answers; the decode replica of a disaggregated request.
        booking: names the booking in later calls.
        hit_tokens: prompt tokens that are counted on not to be computed; `hit_tiers`: where they
            come from (`hbm`, `dram`, `ssd`, `peer`).
        ttft_s: predicted.
        reason: why this one, in a few words.
        prefill: replica that computes the prompt, where that is another.
        serve_s: of `ttft_s`, load and prefill without the queue.
        split: `local: why` or `remote: why`, where there are prefill replicas; else empty.
        prefill_s: predicted seconds until `prefill` has computed the prompt; None where its speed
            was never seen.
    """

    replica: str
    booking: int
    hit_tokens: int
    ttft_s: float
    reason: str
    prefill: str | None = None
    serve_s: float = 0.0
    hit_tiers: Mapping[str, int] = field(default_factory=dict)
    split: str = ""
    prefill_s: float | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that is not served: HTTP 429, or 503 for `no-replica`.

    Attributes:
        reason: `ttft`, `tbt` or `deadline` (predicted to miss it), `no-replica`, `queue-full`, or
            `queue-time`.
        retry_after_s: when asking again may help.
    """

    reason: str
    retry_after_s: float


class Router(Protocol):
    """Chooses replicas and keeps count of what it sent where. Thread-safe."""

    def choose(self, ask: Ask, now_s: float) -> Choice | Refused:
        """Chooses and books in one step."""
        ...

    def has_room(self, now_s: float) -> bool:
        """Whether a replica should get more now; yes where none could be chosen."""
        ...

    def need(self, ask: Ask, ahead_s: float, now_s: float) -> Need | Refused:
        """What a request would take, to put those in order that wait; books nothing.

        Args:
            ahead_s: seconds of work that wait already; where that makes it late, it is refused.
        """
        ...

    def prefilled(self, booking: int, now_s: float, *, done: bool = True) -> None:
        """The prefill replica is through with the prompt; not `done`: the other computes it.

        Ignored where there is no prefill replica.
        """
        ...

    def joins(self, booking: int) -> Refused | None:
        """Judges a request again whose prompt another replica has computed; it stays booked."""
        ...

    def first_token(self, booking: int, now_s: float) -> None:
        """The first token came. Unknown and finished bookings are ignored, here and below."""
        ...

    def progress(self, booking: int, tokens: int, now_s: float, *, timely: bool = True) -> None:
        """So many tokens of output came in all.

        Not `timely`: they waited for the client before they were seen, so when says nothing of the
        replica.
        """
        ...

    def finish(self, booking: int, now_s: float, *, failed: bool = False) -> None:
        """The request is over; a failed one teaches nothing. May be called again."""
        ...

    def add(self, replica: str, *, role: str = "both") -> None:
        """A replica that does `both`, `prefill` or `decode`; one that is known keeps its bookings.

        Raises:
            ValueError: another role.
        """
        ...

    def set_state(self, replica: str, *, healthy: bool, draining: bool = False) -> None:
        """Unhealthy and draining replicas get nothing new; an unknown one is ignored."""
        ...

    def remove(self, replica: str) -> None:
        """Forgets a replica; its bookings stay open until `finish`."""
        ...

    @property
    def booked(self) -> int:
        """Bookings that are open; 0 when idle."""
        ...
