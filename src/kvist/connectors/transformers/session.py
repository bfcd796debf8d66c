"""`generate` with a store behind it: the same tokens, without computing a stored prefix again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvist.connectors.appraiser import Appraisal, Appraiser
from kvist.connectors.fallback import Fallback
from kvist.connectors.identity import fingerprint, keyspace_for, weights_id, windows_text
from kvist.connectors.transformers.blend import (
    Blended,
    Blender,
    BlendOutcome,
    BlendReport,
    BlendSettings,
    open_blender,
)
from kvist.connectors.transformers.blocks import Staging, cached_tokens, canonical_blocks
from kvist.connectors.transformers.timing import first_pass, seed_of
from kvist.core.errors import UnsupportedError
from kvist.core.keys import Key, RequestScope, seed_bytes
from kvist.core.keyspace import Keyspace
from kvist.core.lease import BlockStore, ReadLease
from kvist.core.outcome import BlockRef, Outcome
from kvist.native import chain_keys, digest

_NO_SCOPE = RequestScope()
_LOOK_S = 0.01  # how often a load under way is compared with its prediction
# Arguments of `generate` that are no generation setting and change no KV.
_HARMLESS = frozenset(
    [
        "attention_mask",
        "generation_config",
        "logits_processor",
        "stopping_criteria",
        "streamer",
        "prefix_allowed_tokens_fn",
        "negative_prompt_ids",
        "negative_prompt_attention_mask",
        "tokenizer",
        "synced_gpus",
    ]
)


@dataclass(frozen=True, slots=True)
class Report:
    """What one `generate` took from the store and gave to it.

    `computed_tokens` counts prompt tokens only; `saved_blocks` those that were new to the store.
    `tokens_by_tier` is the matched prefix; `blend` says what came from text elsewhere.
    `faults` counts by class the errors that were turned into recomputation.
    """

    prompt_tokens: int = 0
    tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
    computed_tokens: int = 0
    saved_blocks: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)
    blend: BlendReport = field(default_factory=BlendReport)


@dataclass(frozen=True, slots=True)
class _Prefix:
    cache: DynamicCache
    blocks: int
    tokens_by_tier: Mapping[str, int]


class TransformersKvist:
    """A model and a store. One thread at a time; the store may be shared and stays the caller's.

    The weights are named by the files they came from: a model changed after loading (merged
    adapters, further training) must be saved and loaded again first.
    """

    def __init__(
        self,
        model: Any,
        store: BlockStore,
        keyspace: Keyspace,
        *,
        read_deadline_s: float,
        blend: BlendSettings | None = None,
    ) -> None:
        self.store = store
        self.keyspace = keyspace
        self.last = Report()
        self._model = model
        self._deadline_s = read_deadline_s
        self._fingerprint = fingerprint(keyspace)
        self._fallback = Fallback()
        layout = keyspace.layout
        self.appraiser = Appraiser(
            seed_of(model), block_tokens=layout.block_tokens, block_bytes=layout.block_bytes
        )
        self.blend_off = "not asked for"  # why prompts are not blended; empty if they are
        self.blend_outcomes: Counter[BlendOutcome] = Counter()  # of all prompts so far
        self._blender: Blender | None = None
        if blend is not None:
            self._blender, self.blend_off = open_blender(
                model, store, layout, self.appraiser, blend, read_deadline_s
            )

    @classmethod
    def open(
        cls,
        model: Any,
        *,
        store: BlockStore | Callable[[Keyspace], BlockStore],
        model_path: Path | str | None = None,
        block_tokens: int = 128,
        read_deadline_s: float = 5.0,
        blend: BlendSettings | None = None,
    ) -> TransformersKvist:
        """Binds `model` to a store.

        Args:
            model: a decoder-only Transformers model.
            store: a store whose blocks have this model's layout, or what makes one for a keyspace.
            model_path: the folder the weights came from; by default where the model says.
            block_tokens: tokens in a block.
            read_deadline_s: how long a load may take before the rest is recomputed.
            blend: also reuse text that is cached elsewhere than in a prefix. Answers change: such
                KV is repaired, not that of a whole pass. A model that cannot be blended is served
                without; `blend_off` says why.

        Raises:
            UnsupportedError: the model has sliding windows, latent or recurrent attention, or a
                cache that is not a `DynamicCache` of full attention layers.
            ConfigError: the weights cannot be identified.
        """
        keyspace = model_keyspace(model, model_path=model_path, block_tokens=block_tokens)
        opened = store(keyspace) if callable(store) else store
        return cls(model, opened, keyspace, read_deadline_s=read_deadline_s, blend=blend)

    def generate(
        self, input_ids: torch.Tensor, *, scope: RequestScope = _NO_SCOPE, **kwargs: Any
    ) -> Any:
        """`model.generate(input_ids, **kwargs)`, for one sequence, from the longest stored prefix.

        Full blocks that are new, of the prompt and of what was decoded, are saved. Whatever goes
        wrong with the store is computed instead and counted in `last.faults`.

        Args:
            input_ids: `[1, tokens]`.
            scope: LoRA adapter digest and tenant salt of this request.
            kwargs: as for `model.generate`.

        Returns:
            What `model.generate` returns.

        Raises:
            UnsupportedError: a batch, beams, padding, or an argument that may change KV in a way
                that keys do not show.
        """
        self._check(input_ids, scope, kwargs)
        layout = self.keyspace.layout
        prompt: list[int] = input_ids[0].tolist()
        seed = digest(seed_bytes(self._fingerprint, scope))
        # One token at least is left to compute: its logits choose the next one.
        usable = prompt[: max(0, len(prompt) - 1)]
        keys = chain_keys(seed, usable, layout.block_tokens)
        nothing = _Prefix(DynamicCache(config=self._model.config), 0, {})
        prefix = (
            self._fallback.guard("load", lambda: self._load(keys, len(prompt)), default=None)
            or nothing
        )
        matched = prefix.blocks * layout.block_tokens
        blended = self._blend(usable, seed, prefix, matched)
        report = blended.report if isinstance(blended, Blended) else blended
        if isinstance(blended, Blended):
            prefix = replace(prefix, cache=blended.cache)
        kwargs.setdefault("attention_mask", torch.ones_like(input_ids))
        cached = len(usable) if isinstance(blended, Blended) else matched
        with first_pass(self._model) as pass_time:
            out = self._model.generate(input_ids, past_key_values=prefix.cache, **kwargs)
        self.appraiser.passed([(len(prompt) - cached, cached)], pass_time.seconds)
        sequence = out if isinstance(out, torch.Tensor) else out.sequences
        tokens: list[int] = sequence[0].tolist()
        saved = 0
        tainted = isinstance(blended, Blended) and blended.tainted
        if (
            tokens[: len(prompt)] == prompt and not tainted
        ):  # else `generate` rewrote the prompt: KV of what?
            saved = self._fallback.guard(
                "save", lambda: self._save(seed, tokens, prefix), default=0
            )
        self.last = Report(
            prompt_tokens=len(prompt),
            tokens_by_tier=prefix.tokens_by_tier,
            computed_tokens=len(prompt) - matched - report.blended_tokens + report.repaired_tokens,
            saved_blocks=saved,
            faults=self._fallback.take(),
            blend=report,
        )
        return out

    def _blend(
        self, tokens: Sequence[int], seed: bytes, prefix: _Prefix, matched: int
    ) -> Blended | BlendReport:
        blender = self._blender
        if blender is None:
            return BlendReport()
        found = self._fallback.guard(
            "blend",
            lambda: blender.blend(tokens, seed, prefix.cache, matched),
            default=BlendReport(BlendOutcome.FAILED),
        )
        report = found.report if isinstance(found, Blended) else found
        self.blend_outcomes[report.outcome] += 1
        return found

    def _load(self, keys: Sequence[Key], prompt_tokens: int) -> _Prefix | None:
        match = self.store.match(keys)
        self.appraiser.read(self.store.read_totals())
        plan = self.appraiser.plan(match, prompt_tokens=prompt_tokens, computed_tokens=0)
        probe = self.appraiser.probe(match, plan.decision, time.monotonic())
        if probe is not None:
            if probe.wished_blocks:
                self.store.prefetch(keys[: probe.wished_blocks], deadline_s=self._deadline_s)
            plan = probe.appraisal
        found = min(plan.decision.load_blocks, self.store.room_blocks())
        if not found:
            return None
        layout = self.keyspace.layout
        staging = Staging(layout, found)
        began_s, copy_s = time.monotonic(), 0.0
        with self.store.read(keys[:found], deadline_s=self._deadline_s) as lease:
            blocks = 0
            while blocks < found and _arrived(lease, blocks, plan, began_s):
                copying_s = time.monotonic()
                staging.fill(blocks, lease.buffer(blocks))
                copy_s += time.monotonic() - copying_s
                blocks += 1
        self.appraiser.copied(blocks * layout.block_bytes, copy_s)
        if not blocks:
            return None
        tiers: dict[str, int] = {}
        for tier in match.tiers[:blocks]:
            tiers[tier.value] = tiers.get(tier.value, 0) + layout.block_tokens
        cache = staging.to_cache(blocks, self._model.config, self._model.device)
        return _Prefix(cache, blocks, tiers)

    def _save(self, seed: bytes, tokens: Sequence[int], prefix: _Prefix) -> int:
        """Saves the full blocks after the prefix; returns how many were new."""
        layout = self.keyspace.layout
        # The last token was chosen but not fed back, and speculation may leave drafts behind:
        # a block counts only where both the cache and the answer have all of it.
        covered = min(cached_tokens(prefix.cache, layout), len(tokens))
        keys = chain_keys(seed, tokens[:covered], layout.block_tokens)
        first = prefix.blocks
        last = min(len(keys), first + self.store.room_blocks())
        if self._blender is not None:
            self._blender.present(keys[: prefix.blocks], tokens, seed)
        if last <= first:
            return 0
        refs = [BlockRef(keys[i], keys[i - 1] if i else None) for i in range(first, last)]
        saved = 0
        with self.store.write(refs) as lease:
            for i, block in canonical_blocks(prefix.cache, layout, first, last):
                if not lease.present(i - first):
                    lease.buffer(i - first).cast("B")[:] = block
                    saved += lease.commit(i - first)
        if self._blender is not None:
            self._blender.present(keys[:last], tokens, seed)
        return saved

    def _check(self, input_ids: torch.Tensor, scope: RequestScope, kwargs: dict[str, Any]) -> None:
        if input_ids.ndim != 2 or input_ids.shape[0] != 1:
            raise UnsupportedError(
                f"input_ids of shape {list(input_ids.shape)}", remedy="generate one row at a time"
            )
        settings = self._model.generation_config
        for name in kwargs:
            if name not in _HARMLESS and not hasattr(settings, name):
                raise UnsupportedError(f"generate(…, {name}=…)", remedy="call model.generate")
        chosen = kwargs.get("generation_config") or settings
        wanted = {name: kwargs.get(name, getattr(chosen, name, None)) for name in _REQUIRED}
        for name, value in wanted.items():
            if value not in _REQUIRED[name]:
                raise UnsupportedError(
                    f"generate with {name}={value!r}", remedy="call model.generate"
                )
        mask = kwargs.get("attention_mask")
        if mask is not None and not bool(torch.all(mask == 1)):
            raise UnsupportedError("an attention mask with zeros", remedy="leave padding out")
        if mask is None and self._padded(input_ids, chosen, kwargs):
            raise UnsupportedError("a prompt with padding", remedy="pass attention_mask")
        if getattr(self._model, "_hf_peft_config_loaded", False) and not scope.lora:
            raise UnsupportedError(
                "a LoRA adapter is active", remedy="pass scope=RequestScope(lora=lora_id(folder))"
            )

    def _padded(self, input_ids: torch.Tensor, chosen: Any, kwargs: dict[str, Any]) -> bool:
        """Whether `generate` would itself infer a mask with zeros from the padding token."""
        pad = kwargs.get("pad_token_id", chosen.pad_token_id)
        eos = kwargs.get("eos_token_id", chosen.eos_token_id)
        ends = eos if isinstance(eos, (list, tuple)) else [eos]
        return pad is not None and pad not in ends and bool((input_ids == pad).any())


_REQUIRED: Mapping[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "token_healing": (None, False),
}


def _arrived(lease: ReadLease, block: int, plan: Appraisal, began_s: float) -> bool:
    """Waits until `block` is there; `False` if it is not to be had, or not worth the wait."""
    while True:
        outcome = lease.wait(block, timeout_s=_LOOK_S)
        if outcome is not Outcome.PENDING:
            return outcome is Outcome.HIT
        if plan.behind(lease.hits(), time.monotonic() - began_s):
            return False


def model_keyspace(
    model: Any, *, model_path: Path | str | None = None, block_tokens: int = 128
) -> Keyspace:
    """The keyspace of a loaded Transformers model.

    Raises:
        UnsupportedError, ConfigError: as for `TransformersKvist.open`.
    """
    config = model.config
    if windows_text(config) != "null":
        raise UnsupportedError(
            "sliding-window attention in Transformers, whose cache drops old tokens",
            remedy="serve this model with vLLM",
        )
    dtype = str(model.dtype).removeprefix("torch.")
    folder = model_path if model_path is not None else getattr(config, "_name_or_path", "")
    keyspace = keyspace_for(
        config,
        weights=weights_id(folder, getattr(config, "_commit_hash", None)),
        block_tokens=block_tokens,
        kv_dtype=dtype,
        activation_dtype=dtype,
    )
    layers = DynamicCache(config=config).layers
    plain = all(type(layer) is DynamicLayer for layer in layers)
    if keyspace.layout.kinds != 2 or not plain or len(layers) not in (0, keyspace.layout.layers):
        raise UnsupportedError(
            "a cache that is not one K and V per layer", remedy="serve this model with vLLM"
        )
    return keyspace
