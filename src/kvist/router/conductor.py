"""The router of a gateway: chooses, books, learns, and tells other gateways.

Theory of operation. `choose` makes a view of every open replica, lets the policy pick, asks
admission, and books, all under one lock: the next request sees what this one added. A booking ends
its prefill at the first token and goes at `finish`, whichever order they come in, and calls for a
booking that is gone are ignored. Ends teach how long decodes last and how long outputs are; how
fast a replica is, `learning` tells from when tokens come.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field, replace

from kvist.cost.decode import DecodeTimes
from kvist.cost.learner import WARM_UP
from kvist.cost.prefill import PrefillTimes
from kvist.router.admission import Admission, Limits, Rule
from kvist.router.bookings import Work
from kvist.router.candidates import NOTHING, LearnsChoices, Prefix, Prefixes
from kvist.router.choice import Selected, make_policy, select
from kvist.router.exchange import EXPIRES_S, LoadReport, OtherGateways
from kvist.router.learning import Stretch
from kvist.router.lengths import Groups
from kvist.router.policies.kvist import DEFAULTS, Settings
from kvist.router.protocol import Ask, Choice, Need, Refused
from kvist.router.replicas import Replica, Speeds, View
from kvist.router.sessions import Sessions
from kvist.router.splitting import HandoverTimes, Splitting, place
from kvist.router.splitting import Rule as SplitRule

HOLD_S = 0.5  # a default; engines fill their steps from it, and hear of more in time
_NO_REPLICA_RETRY_S = 5.0
_LEAST_DECODE_S = 1e-3


@dataclass(frozen=True, slots=True)
class Setting:
    """What of a router can be set; see `config.RouterConfig`.

    Without `splitting` every prompt goes to a replica that prefills, if there are such.
    """

    policy: str = "kvist"
    kvist: Settings = DEFAULTS
    admission: Rule = Rule.NONE
    limits: Limits = field(default_factory=lambda: Limits(30.0, 0.1))
    hold_s: float = HOLD_S
    splitting: Splitting | None = None
    expire_s: float = EXPIRES_S


@dataclass(slots=True)
class _Booking:
    ask: Ask
    prefill: Replica
    decode: Replica
    work: Work
    lacking_tokens: int  # that `decode` needs of what is computed elsewhere
    tokens: int = 0  # of output
    handed_s: float | None = None  # when another replica than `decode` had computed the prompt
    stretch: Stretch | None = None  # once the first token is there

    @property
    def computed(self) -> bool:
        return self.stretch is not None


class KvistRouter:
    """See `protocol.Router`. Thread-safe: one lock around every call."""

    def __init__(
        self, setting: Setting, speeds: Speeds, prefixes: Prefixes, stream: random.Random
    ) -> None:
        """
        Args:
            speeds: what a new replica is believed to do; each learns from there on by itself.
            prefixes: who holds what.
            stream: for draws.

        Raises:
            ConfigError: an unknown policy.
        """
        self.output_lengths = Groups()
        self._speeds = speeds
        self._prefixes = prefixes
        self._learner = prefixes if isinstance(prefixes, LearnsChoices) else None
        self._hold_s = setting.hold_s
        self._splitting = setting.splitting
        self._handovers = HandoverTimes((setting.splitting or Splitting()).tokens_per_s)
        self._policy_name = setting.policy
        self._policy = make_policy(setting.policy, stream, speeds.block_tokens, setting.kvist)
        self._decode_times = Groups(_LEAST_DECODE_S)
        self._admission = Admission(setting.admission, setting.limits, self._decode_times)
        self._others = OtherGateways(stream, setting.expire_s)
        self._sessions = Sessions()
        self._replicas: dict[str, Replica] = {}
        self._bookings: dict[int, _Booking] = {}
        self._last = 0  # booking
        self._reports = 0
        self._booked_s = 0.0
        self._lock = threading.Lock()

    # Requests

    def choose(self, ask: Ask, now_s: float) -> Choice | Refused:
        """See `Router`."""
        with self._lock:
            selected = self._select(ask, self._views(ask, now_s))
            if selected is None:
                return Refused("no-replica", _NO_REPLICA_RETRY_S)
            decode = self._replicas[selected.decode.name]
            serve_s = selected.serve_s + selected.handover_s
            refused = self._admission.at_door(ask, selected.queue_s, serve_s, decode, now_s)
            return refused or self._book(ask, selected, now_s)

    def has_room(self, now_s: float) -> bool:
        """Whether a replica that computes prompts has little enough queued, or none is open.

        A gateway lets requests wait in a `FairQueue` while there is none: what waits at a replica
        can no longer be put in order.
        """
        with self._lock:
            count = len(self._replicas)
            able = [r for r in self._replicas.values() if r.open and self._prefills(r)]
            return not able or any(
                r.queue.left_s(now_s) + r.others.queue_s(r.name, count, now_s) <= self._hold_s
                for r in able
            )

    def need(self, ask: Ask, ahead_s: float, now_s: float) -> Need | Refused:
        """See `Router`."""
        with self._lock:
            able = [view for view in self._views(ask, now_s) if self._prefills(view.replica)]
            if not able:
                return Need(ask.prompt_tokens, 0.0)
            serve_s, best = min(
                ((view.serve_s(view.prefix()), view) for view in able), key=lambda pair: pair[0]
            )
            wait_s = ahead_s / len(able) + min(view.queue_s() for view in able)
            late = self._admission.in_time(ask, wait_s, serve_s, now_s)
            if late is not None:
                return late
            prefix = best.prefix()
            loads = self._speeds.loading is not None
            cached = prefix.reachable_tokens if loads else prefix.hbm_tokens
            return Need(max(0, ask.prompt_tokens - cached), serve_s)

    def joins(self, booking: int) -> Refused | None:
        """See `Router`."""
        with self._lock:
            found = self._bookings.get(booking)
            if found is None or found.prefill is found.decode:
                return None
            return self._admission.before_decode(found.ask, found.decode)

    def prefilled(self, booking: int, now_s: float, *, done: bool = True) -> None:
        """See `Router`."""
        with self._lock:
            found = self._bookings.get(booking)
            if found is None or found.prefill is found.decode or found.computed:
                return
            if found.handed_s is not None:
                return
            self._close_prefill(booking, found, now_s, done=done)
            if done:
                found.handed_s = now_s
                return
            found.prefill, work = found.decode, found.work
            # What of it the first replica has saved is loaded: its time says nothing of computing.
            found.work = replace(work, loads=True)
            found.decode.queues(booking, found.work, now_s)

    def first_token(self, booking: int, now_s: float) -> None:
        """See `Router`."""
        with self._lock:
            found = self._bookings.get(booking)
            if found is None or found.computed:
                return
            if found.handed_s is None:
                self._close_prefill(booking, found, now_s, done=True)
            else:
                self._handovers.observe(found.lacking_tokens, now_s - found.handed_s)
            contexts = found.decode.contexts
            contexts.begin(booking, now_s)
            found.stretch = Stretch(now_s, 1, contexts.changes)

    def progress(self, booking: int, tokens: int, now_s: float, *, timely: bool = True) -> None:
        """See `Router`."""
        with self._lock:
            found = self._bookings.get(booking)
            if found is None or tokens <= found.tokens:
                return
            decode = found.decode
            if found.stretch is not None:
                alone = timely and not decode.queue
                found.stretch.look(
                    tokens, now_s, decode.contexts, decode.speeds.decode, alone=alone
                )
            decode.contexts.grow(booking, tokens - found.tokens)
            found.tokens = tokens

    def finish(self, booking: int, now_s: float, *, failed: bool = False) -> None:
        """See `Router`."""
        with self._lock:
            found = self._bookings.pop(booking, None)
            if found is None:
                return
            if not found.computed and found.handed_s is None:
                self._close_prefill(booking, found, now_s, done=False)
            context = found.decode.contexts.remove(booking)
            found.decode.blocks.release(found.ask.keys)
            if failed or context is None or not context.live:
                return
            ask = found.ask
            self._decode_times.observe(ask.tenant, ask.endpoint, now_s - context.since_s)
            if found.tokens:
                self.output_lengths.observe(ask.tenant, ask.endpoint, found.tokens)

    @property
    def booked(self) -> int:
        """See `Router`."""
        return len(self._bookings)

    # Replicas

    def add(self, replica: str, *, role: str = "both") -> None:
        """See `Router`."""
        with self._lock:
            known = self._replicas.get(replica)
            if known is not None and known.role == role:
                known.healthy, known.draining = True, False
                return
            seed = self._speeds
            own = Speeds(
                PrefillTimes(seed.prefill.coefficients),
                DecodeTimes(seed.decode.coefficients),
                seed.block_tokens,
                seed.loading,
                seed.step_tokens,
                seed.kv_tokens,
                seed.guessed,
                seed.tbt_s,
            )
            self._replicas[replica] = Replica(replica, role, own, self._others)

    def set_state(self, replica: str, *, healthy: bool, draining: bool = False) -> None:
        """See `Router`."""
        with self._lock:
            found = self._replicas.get(replica)
            if found is not None:
                found.healthy, found.draining = healthy, draining
                if not healthy and self._learner is not None:
                    self._learner.removed(replica)  # what it had in HBM is gone with it

    def remove(self, replica: str) -> None:
        """See `Router`."""
        with self._lock:
            if self._replicas.pop(replica, None) is not None:
                self._sessions.forget(replica)
                if self._learner is not None:
                    self._learner.removed(replica)

    # Other gateways

    def report(self, gateway: str, now_s: float) -> LoadReport:
        """What this one has booked, for the others; `gateway` is its name."""
        with self._lock:
            self._reports += 1
            loads = {r.name: r.report(now_s) for r in self._replicas.values() if r.requests}
            return LoadReport(gateway, self._reports, self._booked_s, loads)

    def hear(self, report: LoadReport, now_s: float) -> bool:
        """Takes in what another one has booked; False for what is old or beyond a limit."""
        with self._lock:
            self._others.forget_silent(now_s)
            return self._others.hear(report, now_s)

    def forget_silent(self, now_s: float) -> None:
        """Others that were not heard for too long book nothing; to be called now and then."""
        with self._lock:
            self._others.forget_silent(now_s)

    @property
    def other_gateways(self) -> int:
        """Those whose bookings count now."""
        return len(self._others)

    # Under the lock

    def _select(self, ask: Ask, views: list[View]) -> Selected | None:
        if self._splitting is None:
            return select(self._policy, ask, views)
        return place(self._policy, ask, views, self._splitting, self._handovers)

    def _prefills(self, replica: Replica) -> bool:
        """Whether prompts may be computed there."""
        if replica.role == "both":
            return True
        how = self._splitting
        if how is None or how.rule is SplitRule.ALWAYS:
            return replica.role == "prefill"
        return replica.role == "decode" or how.rule is not SplitRule.NEVER

    def _views(self, ask: Ask, now_s: float) -> list[View]:
        if self._learner is not None:
            self._learner.expire(now_s)
        keys = ask.keys[: max(0, ask.prompt_tokens - 1) // self._speeds.block_tokens]
        matched = self._prefixes.match(keys)
        far = max((prefix.reachable_tokens for prefix in matched.values()), default=0)
        nothing = Prefix(0, 0, 0, far) if far else NOTHING
        home = self._sessions.home(ask.session)
        decode_s = self._decode_times.all.quantile(0.5)
        return [
            View(
                replica, ask, keys, matched.get(name, nothing),
                replicas=len(self._replicas), stays=home == name, now_s=now_s, decode_s=decode_s,
            )
            for name, replica in self._replicas.items()
            if replica.open and name not in ask.exclude
        ]  # fmt: skip

    def _book(self, ask: Ask, selected: Selected, now_s: float) -> Choice:
        self._last += 1
        booking = self._last
        prefill = self._replicas[selected.prefill.name]
        decode = self._replicas[selected.decode.name]
        hit = self._hit_tokens(selected, prefill, ask)
        loads = hit > selected.reuse.hbm_tokens
        work = Work(selected.serve_s, max(0, ask.prompt_tokens - hit), hit, loads, ask.streams)
        prefill.queues(booking, work, now_s)
        prefill.blocks.hold(ask.keys)
        prefill.uses(ask.lora)
        if decode is not prefill:
            decode.blocks.hold(ask.keys)
        times = self._decode_times.of(ask.tenant, ask.endpoint)
        decode.contexts.expect(booking, ask.prompt_tokens, now_s + selected.ttft_s, times)
        self._booked_s += selected.serve_s
        self._sessions.went(ask.session, prefill.name)
        if self._learner is not None:
            for name in {prefill.name: None, decode.name: None}:
                self._learner.chosen(name, ask.keys, now_s)
        self._bookings[booking] = _Booking(ask, prefill, decode, work, selected.lacking_tokens)
        return Choice(
            replica=decode.name,
            booking=booking,
            hit_tokens=hit,
            ttft_s=selected.ttft_s,
            reason=f"{self._policy_name}: queue {selected.queue_s:.3f} s, "
            f"serve {selected.serve_s:.3f} s, {hit} of {ask.prompt_tokens} tokens cached",
            prefill=None if decode is prefill else prefill.name,
            serve_s=selected.serve_s,
            hit_tiers=selected.reuse.by_tier(hit),
            split=selected.split,
            prefill_s=selected.queue_s + selected.serve_s
            if prefill.speeds.prefill.observed >= WARM_UP
            else None,
        )

    @staticmethod
    def _hit_tokens(selected: Selected, replica: Replica, ask: Ask) -> int:
        reuse = selected.reuse
        if replica.speeds.loading is None:
            return reuse.hbm_tokens
        far = reuse.reachable_tokens > reuse.own_tokens
        if far and selected.prefill.serve_s(reuse.alone()) > selected.serve_s:
            return reuse.reachable_tokens
        return reuse.own_tokens

    @staticmethod
    def _close_prefill(booking: int, found: _Booking, now_s: float, *, done: bool) -> None:
        found.prefill.computed(booking, found.work, now_s, done=done)
        if found.prefill is not found.decode:
            found.prefill.blocks.release(found.ask.keys)
