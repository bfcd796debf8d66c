"""From what happened to every request, and what every node counted, to a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from kvist.sim.des.engine import Engine
from kvist.sim.des.links import LinkKind
from kvist.sim.des.loading import Loader
from kvist.sim.des.report import End, LinkReport, Quantiles, Refusal, Report, Served
from kvist.sim.des.sequence import Sequence, longest_gaps_mean_s
from kvist.sim.des.spec import ClusterSpec
from kvist.sim.des.store import Store

_TICK = 50  # ends between two calls of `progress`


class Measures:
    """Takes the end of every request, once."""

    def __init__(self, requests: int, progress: Callable[[int], None] | None) -> None:
        """`progress` gets the number of requests that ended, every few dozen."""
        self.rerouted = 0
        self._requests = requests
        self._progress = progress
        self._served: dict[int, Served] = {}
        self._hit_tokens = {"hbm": 0, "dram": 0, "ssd": 0, "remote": 0}
        self._input_tokens = 0

    def ended(
        self, sequence: Sequence, end: End, now_s: float, refusal: Refusal | None = None
    ) -> None:
        """Books the end of a request.

        Raises:
            ValueError: it ended before.
        """
        if sequence.number in self._served:
            raise ValueError(f"request {sequence.number} ended twice")
        finished = end is End.FINISHED
        cached = sum(sequence.cached_tokens.values())
        self._served[sequence.number] = Served(
            arrival_s=sequence.arrival_s,
            input_tokens=sequence.request.input_tokens,
            output_tokens=sequence.generated,
            end=end,
            ttft_s=sequence.first_token_s - sequence.arrival_s,
            tbt_s=longest_gaps_mean_s(sequence.gaps) if finished else 0.0,
            end_s=now_s,
            cached_tokens=cached,
            refusal=refusal,
        )
        if sequence.cached_tokens:
            self._input_tokens += sequence.request.input_tokens
            for tier, tokens in sequence.cached_tokens.items():
                self._hit_tokens[tier] += tokens
        if self._progress is not None and len(self._served) % _TICK == 0:
            self._progress(len(self._served))

    def report(
        self, spec: ClusterSpec, seed: int, engines: list[Engine], store: Store, loader: Loader,
        events: int, moving_s: float,
    ) -> Report:  # fmt: skip
        """The report of a run that is over; its last byte moved at `moving_s`."""
        served = tuple(self._served[number] for number in sorted(self._served))
        finished = [s for s in served if s.end is End.FINISHED]
        duration_s = max((s.end_s for s in served), default=0.0)
        within = sum(s.meets(spec.slo) for s in served)
        devices = spec.hardware.count
        reasons = {reason.value: count for reason, count in loader.reasons.items() if count}
        refusals = [s.refusal for s in served if s.refusal is not None]
        return Report(
            seed=seed,
            slo=spec.slo,
            requests=len(served),
            duration_s=duration_s,
            finished=len(finished),
            rejected=sum(s.end is End.REJECTED for s in served),
            failed=sum(s.end is End.FAILED for s in served),
            preempted=sum(engine.preempted for engine in engines),
            rerouted=self.rerouted,
            ttft_s=Quantiles.of([s.ttft_s for s in served if math.isfinite(s.ttft_s)]),
            tbt_s=Quantiles.of([s.tbt_s for s in finished if s.output_tokens > 1]),
            itl_s=weighted_quantiles(w for engine in engines for w in engine.batch.weights),
            goodput_rps=within / duration_s if duration_s else 0.0,
            effective_ratio=within / max(1, len(served)),
            hit_tokens=dict(self._hit_tokens),
            input_tokens=self._input_tokens,
            prefill_device_s=math.fsum(engine.prefill_s for engine in engines) * devices,
            decode_device_s=math.fsum(engine.decode_s for engine in engines) * devices,
            links=_links(store, max(duration_s, moving_s)),
            ssd_written_blocks=store.written_blocks,
            load_reasons=reasons,
            loads_cut_off=loader.cut_off,
            loads_failed=loader.failed,
            saves_dropped=store.dropped_blocks,
            refusals={r.value: refusals.count(r) for r in Refusal if r in refusals},
            events=events,
            served=served,
        )


def weighted_quantiles(weights: Iterable[tuple[float, int]]) -> Quantiles:
    """Mean and nearest-rank quantiles of values given as (value, how many)."""
    table = np.array(list(weights), dtype=np.float64).reshape(-1, 2)
    if not table.size:
        return Quantiles(0.0, 0.0, 0.0, 0.0)
    table = table[np.argsort(table[:, 0], kind="stable")]
    upto = np.cumsum(table[:, 1])
    total = upto[-1]
    ranks = np.searchsorted(upto, np.ceil(np.array([0.5, 0.9, 0.99]) * total))
    mean = math.fsum((table[:, 0] * table[:, 1]).tolist()) / float(total)
    return Quantiles(mean, *(float(v) for v in table[ranks, 0]))


def _links(store: Store, duration_s: float) -> dict[str, LinkReport]:
    found = {}
    for kind in LinkKind:
        links = [node.links[kind] for node in store.nodes]
        moved = math.fsum(link.moved_bytes for link in links)
        room = [max(1e-12, link.bytes_per_s * duration_s) for link in links]
        busiest = max(link.moved_bytes / r for link, r in zip(links, room, strict=True))
        found[kind.value] = LinkReport(moved, moved / math.fsum(room), busiest)
    return found
