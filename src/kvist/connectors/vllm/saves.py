"""Saves: from full pages to committed blocks.

A step fills blocks; slots are reserved and copies ordered with that step; workers copy after the
forward pass; when every rank reports, the blocks are committed. The pages of a finished request are
kept until then; those of a preempted one are fenced. Where nothing is ever asked for again, new
blocks are not saved (`connectors/reuse.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from kvist.connectors.plan import BlockGeometry
from kvist.connectors.reuse import ReuseWatch
from kvist.connectors.vllm.event_feed import EventFeed
from kvist.connectors.vllm.messages import CopyJob, StepReport
from kvist.connectors.vllm.sequences import Sequence
from kvist.connectors.vllm.stats import Tally
from kvist.core.errors import LeaseError, NoSpaceError
from kvist.core.keys import Key
from kvist.core.lease import BlockStore, WriteLease, commit_each
from kvist.core.outcome import BlockRef


@dataclass(slots=True)
class Save:
    """Blocks being copied from a request's pages into reserved slots."""

    seq: Sequence
    lease: WriteLease
    blocks: range
    indices: tuple[int, ...]  # which of `blocks` the lease reserved
    slots: tuple[int, ...]  # and where
    preemptions: int  # of the request at the start: a change means that its pages are gone
    ranks: int = 0
    failed: bool = False


@dataclass(slots=True)
class SaveKnobs:
    """What the configuration says about saving."""

    enabled: bool
    decode: bool
    all_blocks: bool = True


@dataclass(slots=True)
class Saves:
    """All saves of one engine."""

    store: BlockStore
    geometry: BlockGeometry
    knobs: SaveKnobs
    world_size: int
    feed: EventFeed
    tally: Tally
    job_id: Callable[[], int]
    save_ratio: Callable[[], float] = lambda: 0.0
    reuse: ReuseWatch = field(default_factory=ReuseWatch)
    _jobs: dict[int, Save] = field(default_factory=dict)
    _orders: list[CopyJob] = field(default_factory=list)
    _pending: dict[str, int] = field(default_factory=dict)  # request → unfinished saves
    _held: set[str] = field(default_factory=set)  # finished, pages kept for us
    _release: list[str] = field(default_factory=list)

    def offer(self, seq: Sequence, computed_tokens: int, table: Callable[[], Seq[int]]) -> None:
        """Reserves slots for newly full blocks of a request and orders their copies."""
        if not self.knobs.enabled:
            return
        request = seq.request
        known = request.num_tokens if self.knobs.decode else request.num_prompt_tokens
        known = seq.clean_tokens(known)  # blended KV, and what was computed on it, is nobody else's
        blocks = seq.cursor.full_blocks(computed_tokens, known, self.geometry.block_tokens)
        if not blocks:
            return
        keys = seq.chain.extend(request.all_token_ids)
        blocks = self._worth(seq, keys, blocks)
        room = self.store.room_blocks(seq.tenant)
        if room < 1 and blocks:
            self.tally.add("kvist_no_space_total", 1)
        blocks = blocks[: max(0, room)]
        if not blocks:
            return
        try:
            lease = self.store.write(
                [BlockRef(keys[b], seq.chain.parent(b), seq.tenant) for b in blocks]
            )
        except NoSpaceError:
            self.tally.add("kvist_no_space_total", 1)
            return  # offered again next step, while the pages live
        seq.cursor.advance(blocks.stop)
        self.reuse.met(keys[blocks.start : blocks.stop])
        new = tuple(i for i in range(len(blocks)) if not lease.present(i))
        if not new:
            lease.release()
            return
        job, ids = self.job_id(), table()
        try:
            slots = tuple(lease.slot(i) for i in new)
        except LeaseError:
            lease.release()
            return  # the node died just now; nothing was ordered
        pages = tuple(tuple(self.geometry.page_row(blocks[i], ids)) for i in new)
        self._jobs[job] = Save(seq, lease, blocks, new, slots, request.num_preemptions)
        self._pending[request.request_id] = self._pending.get(request.request_id, 0) + 1
        self._orders.append(CopyJob(job, request.request_id, slots, pages))

    def asked(self, seq: Sequence) -> None:
        """A new request has come with these blocks in its prompt."""
        if self.knobs.enabled and not self.knobs.all_blocks:
            self.reuse.asked(seq.chain.extend(seq.request.all_token_ids))

    def _worth(self, seq: Sequence, keys: Seq[Key], blocks: range) -> range:
        """The first of `blocks` that are worth a copy; if none is, none is offered again."""
        if self.knobs.all_blocks or seq.must_save:
            return blocks
        new = keys[blocks.start : blocks.stop]
        worth = self.reuse.worth_saving(new, self.save_ratio())
        if not worth:
            self.reuse.met(new)
            seq.cursor.advance(blocks.stop)
            self.tally.add("kvist_saves_skipped_total", len(blocks))
        return blocks[:worth]

    def orders(self) -> list[CopyJob]:
        """Copies to be done after this step's forward pass."""
        orders, self._orders = self._orders, []
        return orders

    def lost_pages(self) -> bool:
        """Whether pages of an unfinished save went back to the pool (preemption)."""
        return any(s.preemptions != s.seq.request.num_preemptions for s in self._jobs.values())

    def hold(self, req_id: str) -> bool:
        """The request is over; true if its pages must be kept."""
        if self._pending.get(req_id):
            self._held.add(req_id)
            return True
        return False

    def released(self) -> list[str]:
        """Finished requests whose pages need not be kept any more."""
        done, self._release = self._release, []
        return done

    def heard(self, report: StepReport) -> None:
        """Ranks have finished copies; commit what all of them have."""
        for job, ranks in report.done.items():
            save = self._jobs.get(job)
            if save is None:
                continue
            save.ranks += ranks
            save.failed |= job in report.failed
            if save.ranks >= self.world_size:
                del self._jobs[job]
                self._finish(save, report.checksums)

    def _finish(self, save: Save, checksums: Mapping[int, int]) -> None:
        with save.lease as lease:
            if not save.failed:
                sums = [checksums.get(slot) for slot in save.slots]
                done = commit_each(lease, save.indices, sums)
                fresh = [save.blocks[i] for i, ok in zip(save.indices, done, strict=True) if ok]
                self.tally.add("kvist_blocks_saved_total", len(fresh))
                self.tally.add("kvist_tokens_saved_total", len(fresh) * self.geometry.block_tokens)
                self.feed.saved(save.seq, fresh)
        req_id = save.seq.request.request_id
        self._pending[req_id] -= 1
        if not self._pending[req_id]:
            del self._pending[req_id]
            if req_id in self._held:
                self._held.discard(req_id)
                self._release.append(req_id)

    def busy(self) -> bool:
        """Whether the engine must keep stepping for us to hear of copies."""
        return bool(self._jobs or self._release)
