"""Prompts made of text that is cached anywhere: prefix first, spans after, and repair.

Nothing of a blended prompt is given to the store, nor what was decoded on top of it: its keys would
promise KV that no whole pass gives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from transformers import DynamicCache

from kvist.accel.blend.budget import (
    FLOOR_RATIO,
    BlendWork,
    PassFactor,
    RatioChoice,
    RatioReason,
    choose_ratio,
)
from kvist.accel.blend.choice import choose, loaded_parts
from kvist.accel.blend.proof import prove
from kvist.accel.blend.relocate import Relocation
from kvist.accel.blend.repair import Repaired, RepairOutcome, repair
from kvist.accel.blend.schedule import RepairPlan
from kvist.accel.blend.spans import MOST_TOKENS, FoundSpan, SpanIndex
from kvist.accel.blend.transformers_model import TransformersBlendModel
from kvist.connectors.appraiser import Appraiser
from kvist.connectors.transformers.blocks import Staging
from kvist.core.errors import ConfigError, NoSpaceError, UnsupportedError
from kvist.core.keys import Key
from kvist.core.layout import BlockLayout
from kvist.core.lease import BlockStore
from kvist.core.outcome import Outcome, Tier

log = logging.getLogger("kvist.blend")

MOST_DEVIATION_RATIO = 0.1  # tens of times what natural text shows (docs/blend.md)
LEAST_TOKENS = 64
# What a model raises that is not built as its family is: on several devices, say, or renamed parts.
_ODDITIES = (RuntimeError, AttributeError, TypeError, LookupError)
_ROUNDS = 2  # of loading: what is lost may be stored elsewhere as well
_MARGIN_RATIO = 0.1  # of a prefill, what a blend must be predicted to save


@dataclass(frozen=True, slots=True)
class BlendSettings:
    """How prompts are blended.

    `floor_ratio` of the reused tokens is computed again at least; more only where that is free.
    Above `most_deviation_ratio` all are (`RepairPlan`). Prompts with fewer than `least_tokens` to
    reuse behind their prefix are not blended. `index_tokens` of cached text can be found at most.

    Raises:
        ConfigError: a value out of its range.
    """

    floor_ratio: float = FLOOR_RATIO
    most_deviation_ratio: float = MOST_DEVIATION_RATIO
    least_tokens: int = LEAST_TOKENS
    index_tokens: int = MOST_TOKENS

    def __post_init__(self) -> None:
        if not 0 <= self.floor_ratio <= 1:
            raise ConfigError(f"must be in [0, 1], not {self.floor_ratio}", path="floor_ratio")
        if not self.most_deviation_ratio >= 0:
            raise ConfigError("must be 0 or more", path="most_deviation_ratio")
        if self.least_tokens < 1 or self.index_tokens < 1:
            raise ConfigError("must be at least 1", path="least_tokens, index_tokens")


class BlendOutcome(Enum):
    """What became of a prompt; the label in reports."""

    OFF = "off"  # nobody asked for it, or the model cannot be blended
    NOTHING_FOUND = "nothing_found"  # too few tokens behind the prefix are cached anywhere
    LOST = "lost"  # found, but their blocks were gone or late
    RECOMPUTE_FASTER = "recompute_faster"
    BLENDED = "blended"
    FAILED = "failed"  # an error, counted among the faults
    DEVIATES = "deviates"  # all was computed: KV is that of a whole pass


@dataclass(frozen=True, slots=True)
class BlendReport:
    """What blending did for one prompt.

    `blended_tokens` came from spans, `repaired_tokens` of them were computed again; `ratio` and
    `reason` are the budget's. `find_s`, `load_s` and `repair_s` are the seconds that finding the
    spans, bringing their blocks, and moving and repairing their KV took.
    """

    outcome: BlendOutcome = BlendOutcome.OFF
    blended_tokens: int = 0
    repaired_tokens: int = 0
    ratio: float = 0.0
    reason: RatioReason | None = None
    deviation_ratio: float = 0.0
    find_s: float = 0.0
    load_s: float = 0.0
    repair_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Blended:
    """KV of all tokens of a prompt but its last, and how it came about."""

    cache: DynamicCache
    report: BlendReport

    @property
    def tainted(self) -> bool:
        """Whether this KV, and all that is computed on top of it, must not be saved."""
        return self.report.outcome is BlendOutcome.BLENDED


class _Loaded:
    """Blocks that were brought to the host, and which rows of them hold a span."""

    def __init__(self, layout: BlockLayout, most_blocks: int) -> None:
        self._staging = Staging(layout, most_blocks)  # memory that is not filled is not taken
        self.place: dict[Key, int] = {}

    def add(self, key: Key, block: memoryview) -> None:
        """Copies a block that was not here yet."""
        self._staging.fill(len(self.place), block)
        self.place[key] = len(self.place)

    def rows(self, spans: Sequence[FoundSpan]) -> tuple[torch.Tensor, torch.Tensor]:
        """(block, row) of each token of the spans, in order; `[n]` int64 each."""
        blocks, rows = [], []
        for span in spans:
            at = torch.arange(span.first_row, span.first_row + span.tokens)
            held = torch.tensor([self.place[key] for key in span.keys])
            blocks.append(held[at // span.block_tokens])
            rows.append(at % span.block_tokens)
        return torch.cat(blocks), torch.cat(rows)

    def layer(
        self, layer: int, rows: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of those rows, `[kv_heads, n, head_dim]` each."""
        found = self._staging.rows(layer, *rows)  # [n, kind, head, dim]
        return found[:, 0].transpose(0, 1), found[:, 1].transpose(0, 1)


class Blender:
    """Blends prompts of one model over one store. One thread at a time."""

    def __init__(
        self,
        model: Any,
        store: BlockStore,
        layout: BlockLayout,
        appraiser: Appraiser,
        settings: BlendSettings,
        deadline_s: float,
    ) -> None:
        """Proves that the model can be blended.

        Raises:
            UnsupportedError: it cannot.
        """
        self._adapter = TransformersBlendModel(model)
        prove(self._adapter, int(model.config.vocab_size), model.device)
        self.index = SpanIndex(most_tokens=settings.index_tokens)
        self._model = model
        self._store = store
        self._layout = layout
        self._appraiser = appraiser
        self._settings = settings
        self._deadline_s = deadline_s
        self._factor = PassFactor()

    def present(self, keys: Sequence[Key], tokens: Sequence[int], scope: bytes) -> None:
        """These blocks of a sequence, from its first, are in the store: they can be found."""
        size = self._layout.block_tokens
        self.index.store(keys, tokens[: len(keys) * size], size, scope=scope)

    def blend(
        self, tokens: Sequence[int], scope: bytes, prefix: DynamicCache, prefix_tokens: int
    ) -> Blended | BlendReport:
        """KV of `tokens` from a matched prefix and spans; or why there is none.

        Args:
            tokens: all of the prompt but its last token.
            scope: what its keys were seeded with.
            prefix: KV of its first `prefix_tokens` tokens; not changed.
            prefix_tokens: how many blocks matched, in tokens.
        """
        began_s = time.monotonic()
        found = self.index.find(tokens, scope=scope, skip_tokens=prefix_tokens)
        there = self._tiers(key for span in found for key in span.keys)
        wanted = self._chosen(found, there, prefix_tokens)
        if not wanted:
            return BlendReport(BlendOutcome.NOTHING_FOUND)
        needed = {key for span in wanted for key in span.keys}
        load_s = self._appraiser.load_s([there[key] for key in needed])
        choice = self._choice(self._work(len(tokens), prefix_tokens, wanted), load_s)
        if choice.ratio >= 1:
            self._factor.declined()
            return BlendReport(BlendOutcome.RECOMPUTE_FASTER, ratio=1.0, reason=choice.reason)
        loaded = _Loaded(self._layout, len(there))
        found_s = time.monotonic()
        give_up_s = found_s + self._patience_s(choice)
        for _ in range(_ROUNDS):
            self._load(wanted, loaded, give_up_s)
            lost = needed - loaded.place.keys()
            if not lost:
                break
            there = {key: tier for key, tier in there.items() if key not in lost}
            wanted = self._chosen(found, there, prefix_tokens)  # what stands elsewhere as well
            needed = {key for span in wanted for key in span.keys}
        chosen = self._chosen(found, loaded.place, prefix_tokens)
        if chosen != wanted:
            choice = self._choice(self._work(len(tokens), prefix_tokens, chosen), 0.0)
        if not chosen or choice.ratio >= 1:
            return BlendReport(BlendOutcome.LOST, ratio=choice.ratio, reason=choice.reason)
        loaded_s = time.monotonic()
        repaired = self._repair(tokens, prefix, prefix_tokens, chosen, loaded, choice)
        blended = self._blended(repaired, sum(span.tokens for span in chosen), choice)
        times = found_s - began_s, loaded_s - found_s, time.monotonic() - loaded_s
        report = replace(blended.report, find_s=times[0], load_s=times[1], repair_s=times[2])
        return replace(blended, report=report)

    def _tiers(self, keys: Iterable[Key]) -> dict[Key, Tier]:
        """Where each block is; what the store has lost is forgotten."""
        tiers, gone = {}, []
        for key in dict.fromkeys(keys):
            match = self._store.match([key])
            if len(match):
                tiers[key] = match.tiers[0]
            else:
                gone.append(key)
        if gone:
            self.index.forget(gone)
        return tiers

    def _chosen(
        self, found: Iterable[FoundSpan], there: Any, prefix_tokens: int
    ) -> list[FoundSpan]:
        """Disjoint spans of blocks that are `there`, or none if they hold too little."""
        parts = [part for span in found for part in loaded_parts(span, there)]
        chosen = choose(parts, prefix_tokens=prefix_tokens)
        enough = sum(span.tokens for span in chosen) >= self._settings.least_tokens
        return chosen if enough else []

    def _work(self, tokens: int, prefix_tokens: int, spans: Sequence[FoundSpan]) -> BlendWork:
        cached = sum(span.tokens for span in spans)
        return BlendWork(tokens, prefix_tokens, cached, self._layout.layers)

    def _choice(self, work: BlendWork, load_s: float) -> RatioChoice:
        return choose_ratio(
            work,
            self._appraiser.prefill,
            load_s=load_s,
            floor_ratio=self._settings.floor_ratio,
            pass_factor=self._factor.factor,
            margin_ratio=_MARGIN_RATIO,
        )

    def _patience_s(self, choice: RatioChoice) -> float:
        """How long a load may take before computing everything would have been as fast."""
        if choice.reason is RatioReason.UNMEASURED:
            return self._deadline_s
        return min(self._deadline_s, choice.full_s - choice.pass_s)

    def _load(self, spans: Sequence[FoundSpan], loaded: _Loaded, give_up_s: float) -> None:
        """Brings the spans' blocks to the host until `give_up_s`; what does not come is missing."""
        copy_s, before = 0.0, len(loaded.place)
        with ExitStack() as stack:
            leases = []
            for span in spans:
                keys = [key for key in span.keys if key not in loaded.place]
                # A lease a span: keys in the order of their prompt name true parents to the store.
                with suppress(NoSpaceError):
                    lease = self._store.read(keys, deadline_s=self._deadline_s)
                    leases.append((stack.enter_context(lease), keys))
            for lease, keys in leases:
                for i, key in enumerate(keys):
                    left_s = max(0.0, give_up_s - time.monotonic())
                    if lease.wait(i, timeout_s=left_s) is Outcome.HIT and key not in loaded.place:
                        copying_s = time.monotonic()
                        loaded.add(key, lease.buffer(i))
                        copy_s += time.monotonic() - copying_s
        size_bytes = (len(loaded.place) - before) * self._layout.block_bytes
        self._appraiser.copied(size_bytes, copy_s)

    def _repair(
        self,
        tokens: Sequence[int],
        prefix: DynamicCache,
        prefix_tokens: int,
        spans: Sequence[FoundSpan],
        loaded: _Loaded,
        choice: RatioChoice,
    ) -> Repaired:
        began_s = time.monotonic()
        device, total, layout = self._model.device, len(tokens), self._layout
        size = (layout.layers, layout.kv_heads, total, layout.head_dim)
        keys = torch.zeros(size, dtype=getattr(torch, layout.dtype), device=device)
        values = torch.zeros_like(keys)
        rows = loaded.rows(spans)
        to = torch.cat([torch.arange(span.start, span.stop) for span in spans]).to(device)
        stored = torch.cat(
            [torch.arange(s.source_start, s.source_start + s.tokens) for s in spans]
        ).to(device)
        relocation = Relocation(stored, to)
        for layer in range(layout.layers):
            if prefix_tokens:
                keys[layer, :, :prefix_tokens] = prefix.layers[layer].keys[0]
                values[layer, :, :prefix_tokens] = prefix.layers[layer].values[0]
            k, v = loaded.layer(layer, rows)
            rope = self._adapter.rope(layer)
            keys[layer][:, to] = relocation.apply(k.to(device), rope)
            values[layer][:, to] = v.to(device)
        cached = torch.zeros(total, dtype=torch.bool, device=device)
        cached[to] = True
        found = repair(
            self._adapter,
            torch.tensor(tokens, device=device),
            keys,
            values,
            cached,
            RepairPlan(choice.ratio, self._settings.most_deviation_ratio),
            exact_tokens=prefix_tokens,
        )
        if found.outcome is RepairOutcome.BLENDED:
            self._factor.observe(choice, time.monotonic() - began_s)
        return found

    def _blended(self, repaired: Repaired, span_tokens: int, choice: RatioChoice) -> Blended:
        deviates = repaired.outcome is not RepairOutcome.BLENDED
        if deviates:
            log.info(
                "kvist: blended KV deviates by %.3g, so the whole prompt was computed",
                repaired.deviation_ratio,
            )
        cache = DynamicCache(config=self._model.config)
        for layer in range(self._layout.layers):
            cache.update(repaired.keys[layer][None], repaired.values[layer][None], layer)
        report = BlendReport(
            BlendOutcome.DEVIATES if deviates else BlendOutcome.BLENDED,
            blended_tokens=0 if deviates else span_tokens,
            repaired_tokens=0 if deviates else repaired.repaired_tokens,
            ratio=1.0 if deviates else choice.ratio,
            reason=choice.reason,
            deviation_ratio=repaired.deviation_ratio,
        )
        return Blended(cache, report)


def open_blender(
    model: Any,
    store: BlockStore,
    layout: BlockLayout,
    appraiser: Appraiser,
    settings: BlendSettings,
    deadline_s: float,
) -> tuple[Blender | None, str]:
    """A blender; or none, and why the model cannot be blended, which is logged as well."""
    try:
        return Blender(model, store, layout, appraiser, settings, deadline_s), ""
    except (UnsupportedError, *_ODDITIES) as e:
        why = str(e) if isinstance(e, UnsupportedError) else f"the proof failed: {e!r}"
        log.warning("kvist: blend is off: %s", why)
        return None, why
