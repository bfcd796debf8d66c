"""One engine: continuous batching over a bounded HBM, as vLLM schedules it.

Theory of operation. The engine is idle, in a *step* (prefill chunks, and with chunked prefill the
decodes beside them) or in a *run* of decode steps. Between two of these `_schedule` lets finished
transfers join, starts loads for requests that wait, takes prefill work in order of arrival
(skipping requests whose load is under way), and else decodes. A run is cut at the end of its
current step when something arrives, so a step is never interrupted.

A request takes HBM for its whole prompt before its load or prefill begins. Decodes take HBM as they
grow; where there is none, what was taken for waiting requests is given back first, then the latest
request is preempted: its KV is dropped and it waits in front, to be computed again.

A step with prefill and decode reads the weights once, so the smaller of the two fixed parts is
counted once.
"""

from __future__ import annotations

from collections import deque

from kvist.cost.prefill import pass_features
from kvist.sim.des.decoding import MAX_RUN_STEPS, DecodeBatch
from kvist.sim.des.kernel import Event, Kernel
from kvist.sim.des.loading import Load, Loader
from kvist.sim.des.memory import Memory
from kvist.sim.des.owner import Owner
from kvist.sim.des.pools import HbmPool, hbm_order
from kvist.sim.des.sequence import Sequence, State
from kvist.sim.des.spec import ClusterSpec, Prefilling, Role

_EVICTING_STEPS = 32  # of decode for which blocks are evicted at once


class Engine:
    """An engine of one node."""

    def __init__(
        self, kernel: Kernel, index: int, spec: ClusterSpec, block_tokens: int,
        loader: Loader, owner: Owner,
    ) -> None:  # fmt: skip
        engine = spec.engine
        self.index = index
        self.role = spec.roles[index]
        self.alive = True
        self.prefill = spec.prefill()
        self.decode = spec.decode()
        order = hbm_order(engine.hbm_policy)
        self.pool = HbmPool(spec.hbm_tokens(), block_tokens, order, keeps=engine.prefix_cache)
        self.memory = Memory(self.pool)
        self.batch = DecodeBatch(self.decode)
        self.waiting: deque[Sequence] = deque()
        self.joining: deque[Sequence] = deque()  # their KV is here, HBM not yet taken
        self.prefilling: dict[Sequence, None] = {}
        self.queued_s = 0.0  # predicted prefill of `waiting`
        self.bound: dict[Sequence, int] = {}  # tokens of requests that will decode here
        self.bound_tokens = 0
        self.preempted = 0
        self.prefill_s = 0.0
        self.decode_s = 0.0
        self._kernel = kernel
        self._loader = loader
        self._owner = owner
        self.chunked = engine.prefilling is Prefilling.CHUNKED
        self.step_tokens = engine.step_tokens
        self._max_sequences = engine.max_sequences
        self._ahead = spec.store.ahead_requests
        self._layers = max(1, spec.model.layers)
        self._event: Event | None = None
        self._started_s = 0.0
        self._run_steps = 0  # of the run under way; 0 in a step and when idle
        self._chunks: list[tuple[Sequence, int]] = []  # of the step under way
        self._step_s = 0.0
        self._stalled = False  # computed, and a layer's bytes are still to come
        self._busy = False  # in `_schedule`, or in a step
        self._reserved = 0  # of `waiting`, those that hold HBM

    # What comes in

    def submit(self, sequence: Sequence, predicted_s: float) -> None:
        """A request to prefill here; `predicted_s` is what its prefill is believed to take."""
        sequence.node = self.index
        sequence.predicted_s = predicted_s
        self.queued_s += predicted_s
        self.waiting.append(sequence)
        self.wake()

    def bind(self, sequence: Sequence) -> None:
        """Notes that a request will decode here."""
        sequence.decode_node = self.index
        self.bound[sequence] = sequence.context_tokens
        self.bound_tokens += sequence.context_tokens

    def unbind(self, sequence: Sequence) -> None:
        """It is here, or will not come."""
        self.bound_tokens -= self.bound.pop(sequence, 0)

    def join(self, sequence: Sequence) -> None:
        """A request whose KV arrived from a prefill node."""
        self.unbind(sequence)
        sequence.node = self.index
        sequence.state = State.DECODE
        self.joining.append(sequence)
        self.wake()

    def wake(self) -> None:
        """Something may have become possible: acts now, or at the end of the current step."""
        if self._busy or not self.alive:
            return
        if not self._run_steps:
            self._schedule()
            return
        steps = self.batch.steps_after(self._kernel.now_s - self._started_s)
        if steps < self._run_steps:
            self.pool.give((self._run_steps - steps) * len(self.batch))
            self._run_steps = steps
            self._kernel.cancel(self._event)
            end_s = max(self._kernel.now_s, self._started_s + self.batch.run_s(steps))
            self._event = self._kernel.at(end_s, self._end_run)

    def lose(self) -> list[Sequence]:
        """The node is gone: returns the requests that it had, in order of number."""
        self.alive = False
        self._kernel.cancel(self._event)
        members = list(self.batch.members)
        if self._run_steps:
            done = self.batch.steps_before(self._kernel.now_s - self._started_s)
            if done:
                self._commit(done, self._started_s + self.batch.run_s(done))
                members = list(self.batch.members)
        for sequence in members:
            self.batch.leave(sequence)
        lost = [*self.waiting, *self.joining, *self.prefilling, *members]
        for sequence in lost:
            self._loader.cancel(sequence)
        self.waiting.clear()
        self.joining.clear()
        self.prefilling.clear()
        self.bound.clear()
        self._chunks = []
        self.queued_s, self.bound_tokens = 0.0, 0
        self._run_steps, self._busy, self._stalled, self._event = 0, False, False, None
        self._reserved = 0
        self.pool.clear()
        return sorted(lost, key=lambda sequence: sequence.number)

    @property
    def step_elapsed_s(self) -> float:
        """How long the step under way with prefill in it has run."""
        return self._kernel.now_s - self._started_s if self._chunks else 0.0

    # Scheduling

    def _schedule(self) -> None:
        self._busy = True
        self._let_join()
        self._load_ahead()
        chunks = self._pick_chunks()
        decodes = (self.chunked or not chunks) and self._grow()
        chunks = [(s, n) for s, n in chunks if s in self.prefilling]  # growing may preempt
        if chunks:
            self._start_step(chunks)
            return
        self._busy = False
        if decodes:
            self._start_run()

    def _let_join(self) -> None:
        while self.joining and self._slots() > 0:
            sequence = self.joining[0]
            if not self.memory.receive(sequence, crowded=self._crowded):
                return
            self.joining.popleft()
            self.batch.join(sequence)

    @property
    def _crowded(self) -> bool:
        return bool(self.batch.members or self.prefilling)

    def _slots(self) -> int:
        return self._max_sequences - len(self.batch) - len(self.prefilling)

    def _load_ahead(self) -> None:
        for number in range(min(self._ahead, len(self.waiting))):
            sequence = self.waiting[number]
            if sequence.planned:
                continue
            keys = self.memory.usable(sequence)
            plan = self._loader.plan(sequence, keys, self.memory.matched(keys))
            if plan is not None and plan.decision.load_blocks:
                if not self.memory.reserve(sequence, crowded=self._crowded):
                    return
                sequence.state = State.LOADING
                self._reserved += 1
                self._loader.start(sequence, plan, self._load_ready, self._load_done)
            sequence.planned = True
            self._loader.decided(plan)

    def _load_ready(self, sequence: Sequence) -> None:
        load = _load_of(sequence)
        blocks = len(load.plan.sources) if load.open else load.arrived_blocks
        sequence.assumed_blocks = blocks
        sequence.computed_tokens += blocks * self.pool.block_tokens
        sequence.state = State.READY
        self.wake()

    def _load_done(self, sequence: Sequence) -> None:
        load = _load_of(sequence)
        missing = sequence.assumed_blocks - load.arrived_blocks
        sequence.computed_tokens -= missing * self.pool.block_tokens
        if self._stalled and not self._awaited():
            self._stalled = False
            self._event = self._kernel.after(self._step_s / self._layers, self._end_step)

    def _pick_chunks(self) -> list[tuple[Sequence, int]]:
        """Prefill work of the next step: (request, tokens), those under way first."""
        budget = self.step_tokens - (len(self.batch) if self.chunked else 0)
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self.prefilling:
            left = sequence.prompt_tokens - sequence.computed_tokens
            size = min(left, max(0, budget)) if self.chunked else left
            budget -= size
            if size:
                chunks.append((sequence, size))
        position, reserved, full = 0, self._reserved, False
        while position < len(self.waiting) and budget > 0 and self._slots() > 0:
            sequence = self.waiting[position]
            holds = sequence.state is not State.WAITING
            reserved -= holds
            if sequence.state is State.LOADING or (full and not holds):
                if full and not reserved:
                    break
                position += 1
                continue
            if not sequence.planned or not self._whole_fits(sequence, budget, chunks):
                break
            if not holds and not self.memory.reserve(sequence, crowded=self._crowded):
                full = True  # those behind it that hold HBM already may run
                continue
            left = sequence.prompt_tokens - sequence.computed_tokens
            size = min(left, budget) if self.chunked else left
            budget -= size
            del self.waiting[position]
            self._reserved -= holds
            self._begin_prefill(sequence)
            chunks.append((sequence, size))
        return chunks

    def _whole_fits(
        self, sequence: Sequence, budget: int, chunks: list[tuple[Sequence, int]]
    ) -> bool:
        """Whether a pass that is not cut in chunks takes one more prompt."""
        if self.chunked or not chunks:
            return True
        done = sequence.computed_tokens
        if sequence.state is State.WAITING:
            done = self.memory.cached_tokens(sequence)
        return sequence.prompt_tokens - done <= budget

    def _begin_prefill(self, sequence: Sequence) -> None:
        self.queued_s = max(0.0, self.queued_s - sequence.predicted_s) if self.waiting else 0.0
        sequence.state = State.PREFILL
        self.prefilling[sequence] = None
        if not sequence.generated and not sequence.cached_tokens:
            cached = {"hbm": sequence.held_blocks * self.pool.block_tokens}
            sequence.cached_tokens = cached | self._loader.loaded_tokens(sequence)
        self._owner.prefill_starts(sequence)

    # Steps and runs

    def _start_step(self, chunks: list[tuple[Sequence, int]]) -> None:
        _, linear, square = pass_features([(n, s.computed_tokens) for s, n in chunks])
        times = self.prefill
        prefill_s = step_s = times.a_s + times.b_s * linear + times.c_s * square
        if self.chunked and self.batch.members:
            step_s += self.batch.step_s() - min(times.a_s, self.decode.d0_s)
        self.prefill_s += prefill_s
        self.decode_s += step_s - prefill_s
        self._chunks, self._step_s, self._started_s = chunks, step_s, self._kernel.now_s
        self._event = self._kernel.after(step_s, self._end_step)

    def _awaited(self) -> bool:
        """Whether bytes of a prompt in this step are still to come."""
        return any(isinstance(s.load, Load) and s.load.open for s, _ in self._chunks)

    def _end_step(self) -> None:
        if self._awaited():
            self._stalled, self._event = True, None
            return
        now_s, chunks, self._chunks = self._kernel.now_s, self._chunks, []
        done = []
        if self.chunked and self.batch.members:
            done = self.batch.commit(now_s, now_s, 1)
        for sequence in done:
            self._finish(sequence)
        for sequence, size in chunks:
            sequence.computed_tokens += size
            self.memory.name(sequence)
            if sequence.computed_tokens >= sequence.prompt_tokens:
                self._end_prefill(sequence)
        self._busy = False
        self._schedule()

    def _end_prefill(self, sequence: Sequence) -> None:
        del self.prefilling[sequence]
        sequence.token_at(self._kernel.now_s)
        self._owner.prefilled(sequence)
        if not sequence.left_tokens:
            self._finish(sequence)
        elif self.role is Role.PREFILL:
            sequence.state = State.HANDOVER
            self._owner.hand_over(sequence)
        else:
            sequence.state = State.DECODE
            self.batch.join(sequence)

    def _start_run(self) -> None:
        size = len(self.batch)
        steps = min(self.batch.steps_to_end(), MAX_RUN_STEPS)
        free = self.pool.free_tokens // size + 1  # one step's tokens are taken already
        if free < steps:
            steps = min(steps, max(free, _EVICTING_STEPS), self.pool.spare_tokens // size + 1)
        self.pool.take((steps - 1) * size)
        self._run_steps, self._started_s = steps, self._kernel.now_s
        self._event = self._kernel.after(self.batch.run_s(steps), self._end_run)

    def _end_run(self) -> None:
        steps, self._run_steps = self._run_steps, 0
        self._commit(steps, self._kernel.now_s)
        self._schedule()

    def _commit(self, steps: int, end_s: float) -> None:
        first_end_s = min(end_s, self._started_s + self.batch.step_s())
        self.decode_s += end_s - self._started_s
        for sequence in self.batch.commit(first_end_s, end_s, steps):
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.memory.recount(sequence)
        self.memory.release(sequence)
        sequence.state = State.DONE
        self._owner.finished(sequence)

    # When HBM is full

    def _grow(self) -> bool:
        """Takes HBM for one step of the batch; makes room at the cost of the latest."""
        while self.batch.members:
            if self.pool.take(len(self.batch)):
                return True
            if not self._give_back_waiting() and not self._preempt_latest():
                return False
        return False

    def _give_back_waiting(self) -> bool:
        for sequence in reversed(self.waiting):
            if sequence.state in (State.LOADING, State.READY):
                self._loader.cancel(sequence)
                self.memory.release(sequence)
                self._reserved -= 1
                sequence.restart()
                return True
        return False

    def _preempt_latest(self) -> bool:
        if self.prefilling:
            sequence = next(reversed(self.prefilling))
            del self.prefilling[sequence]
            self._loader.cancel(sequence)
        elif len(self.batch) > 1:
            sequence = next(reversed(self.batch.members))
            self.batch.leave(sequence)
            self.memory.recount(sequence)
        else:
            return False
        self.memory.release(sequence)
        sequence.restart()
        self.preempted += 1
        left_s = self.prefill.prefill_s(sequence.prompt_tokens, 0)
        sequence.predicted_s = left_s
        self.queued_s += left_s
        self.waiting.appendleft(sequence)
        return True


def _load_of(sequence: Sequence) -> Load:
    load = sequence.load
    assert isinstance(load, Load)
    return load
