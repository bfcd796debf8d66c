"""The running batch of an engine, decoded many steps at a time.

Theory of operation. Between two changes of the batch, step i takes `f + i·g` seconds: `f` is the
cost model's step for the batch now, and each step adds one token of context a sequence (`g`). So n
steps take `n·f + g·n(n-1)/2`, and a run of steps is one event. All sequences of a batch have the
same gaps, which stand once in a log of (seconds, count); a sequence notes where in it it began.
The first gap of a sequence is its own: it ends with the first step after it joined. A log's entry
of many steps is their mean; they differ by less than a run's growth of context.
"""

from __future__ import annotations

import heapq
import math

from kvist.cost.decode import DecodeCoefficients
from kvist.sim.des.sequence import Sequence

MAX_RUN_STEPS = 512


class DecodeBatch:
    """Sequences that decode together. Knows no clock: the engine says when steps ran."""

    __slots__ = (
        "_counts",
        "_ends",
        "_fresh",
        "_gaps",
        "_last_step_s",
        "_times",
        "context_tokens",
        "members",
        "steps",
        "weights",
    )

    def __init__(self, times: DecodeCoefficients) -> None:
        self._times = times
        self.members: dict[Sequence, None] = {}  # in order of joining
        self.context_tokens = 0
        self.steps = 0  # that the batch ever took
        self.weights: list[tuple[float, int]] = []  # every gap, times the sequences that had it
        self._ends: list[tuple[int, int, Sequence]] = []  # step of the last token
        self._fresh: list[Sequence] = []  # joined since the last step
        self._gaps: list[float] = []
        self._counts: list[int] = []
        self._last_step_s = 0.0

    def __len__(self) -> int:
        return len(self.members)

    def join(self, sequence: Sequence) -> None:
        """Adds a sequence that has its first token and more to come."""
        self.members[sequence] = None
        self.context_tokens += sequence.context_tokens
        sequence.log_start = -1
        self._fresh.append(sequence)
        end = self.steps + sequence.left_tokens
        heapq.heappush(self._ends, (end, sequence.number, sequence))

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out between steps, and gives it its tokens and gaps until now."""
        del self.members[sequence]
        entry = next(e for e in self._ends if e[2] is sequence)
        self._settle(sequence, entry[0])
        self._ends.remove(entry)
        heapq.heapify(self._ends)

    def steps_to_end(self) -> int:
        """Steps until the first sequence is done."""
        return self._ends[0][0] - self.steps

    def step_s(self) -> float:
        """Seconds of the next step."""
        return self._times.decode_s(len(self.members), self.context_tokens)

    def run_s(self, steps: int) -> float:
        """Seconds of the next `steps`."""
        growth_s = self._times.d2_s * len(self.members)
        return steps * self.step_s() + growth_s * (steps * (steps - 1) / 2)

    def steps_after(self, seconds: float) -> int:
        """Steps that are done, or begun, `seconds` into a run; at least one."""
        first_s, growth_s = self.step_s(), self._times.d2_s * len(self.members)
        half = growth_s / 2
        if half > 0:
            linear = first_s - half
            root = math.sqrt(linear * linear + 4 * half * seconds)
            steps = math.ceil(2 * seconds / (linear + root))  # no cancellation
        else:
            steps = math.ceil(seconds / first_s)
        while steps > 1 and self.run_s(steps - 1) >= seconds:
            steps -= 1
        while self.run_s(steps) < seconds:
            steps += 1
        return max(1, steps)

    def steps_before(self, seconds: float) -> int:
        """Steps that are done `seconds` into a run."""
        steps = self.steps_after(seconds)
        return steps if self.run_s(steps) <= seconds else steps - 1

    def commit(self, first_end_s: float, end_s: float, steps: int) -> list[Sequence]:
        """Books `steps` that ran, and returns the sequences that are done.

        Args:
            first_end_s: when the first was done.
            end_s: when the last was done.
        """
        fresh = self._fresh
        old = len(self.members) - len(fresh)
        if old:
            self._log(first_end_s - self._last_step_s, 1, old)
        for sequence in fresh:
            sequence.first_gap = first_end_s - sequence.last_token_s
            sequence.log_start = len(self._gaps)
            self.weights.append((sequence.first_gap, 1))
        fresh.clear()
        if steps > 1:
            self._log((end_s - first_end_s) / (steps - 1), steps - 1, len(self.members))
        self.steps += steps
        self.context_tokens += steps * len(self.members)
        self._last_step_s = end_s
        done = []
        while self._ends and self._ends[0][0] <= self.steps:
            sequence = heapq.heappop(self._ends)[2]
            del self.members[sequence]
            self._settle(sequence, self.steps)
            done.append(sequence)
        if not self.members:
            self._gaps.clear()
            self._counts.clear()
        return done

    def _log(self, gap_s: float, count: int, sequences: int) -> None:
        self._gaps.append(gap_s)
        self._counts.append(count)
        self.weights.append((gap_s, count * sequences))

    def _settle(self, sequence: Sequence, end_step: int) -> None:
        """Gives a sequence that is no member any more what it got from the batch."""
        got = sequence.left_tokens - (end_step - self.steps)
        if sequence.log_start >= 0:
            sequence.gaps.append((sequence.first_gap, 1))
            begin = sequence.log_start
            sequence.gaps.extend(zip(self._gaps[begin:], self._counts[begin:], strict=True))
            sequence.last_token_s = self._last_step_s
        else:
            self._fresh.remove(sequence)
        sequence.generated += got
        sequence.log_start = -1
        self.context_tokens -= sequence.context_tokens
