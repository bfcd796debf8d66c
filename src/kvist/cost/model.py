"""A model as the cost model sees it: bytes that its cache keeps, and work that a token costs.

A model is a list of *caches* (bytes that each token leaves in some layers, for ever or for a
window), a constant recurrent state, and a list of *attentions* (multiply-adds between a token and
those that it sees). Full attention leaves bytes for ever and sees all before it; a sliding window
keeps and sees a window; MLA keeps a latent but attends with whole heads; sparse attention keeps
all and sees some; linear and state-space layers keep one state a *checkpoint*, not a token, and a
prefix can be resumed only where a checkpoint was kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvist.core.errors import ConfigError, UnsupportedError
from kvist.core.layout import DTYPE_BYTES
from kvist.core.model_config import (
    ATTENTION_KINDS,
    HEADS,
    HIDDEN,
    LAYERS,
    Settings,
    integer,
    kv_heads,
    layer_kinds,
    settings,
    window_tokens,
)
from kvist.cost.parameters import Parameters, count_parameters
from kvist.cost.recurrent import recurrent_layers, recurrent_state_bytes

_INDEXER_SCALE_BYTES = 4  # one float32 a token and layer beside FP8 keys, as vLLM keeps it


@dataclass(frozen=True, slots=True)
class Cache:
    """`layer_bytes` that each token leaves in each of `layers`, within the last `window_tokens`.

    `heads` is over how many tensor-parallel ranks the bytes can be split; more ranks hold copies.
    """

    layers: int
    layer_bytes: int
    heads: int
    window_tokens: int | None = None
    indexer: bool = False

    @property
    def token_bytes(self) -> int:
        return self.layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class Attention:
    """`dims` = query heads × (query·key size + value size) in each of `layers`.

    A token sees all before it, or the last (or best) `seen_tokens`.
    """

    layers: int
    dims: int
    seen_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the time models need of a model; bytes are of the whole model, not of one rank."""

    name: str
    layers: int
    parameters: Parameters
    weight_bytes: int
    caches: tuple[Cache, ...]
    attentions: tuple[Attention, ...]
    state_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes that one more token adds for ever: full-attention layers and indexers."""
        return sum(c.token_bytes for c in self.caches if c.window_tokens is None)

    @property
    def indexer_token_bytes(self) -> int:
        """The part of `token_bytes` that a sparse-attention indexer keeps."""
        return sum(c.token_bytes for c in self.caches if c.indexer)

    @property
    def constant_bytes(self) -> int:
        """Bytes that do not grow: full windows and one checkpoint of recurrent state."""
        windows = sum(c.token_bytes * c.window_tokens for c in self.caches if c.window_tokens)
        return windows + self.state_bytes

    def cache_bytes(self, tokens: int) -> int:
        """Bytes that the cache of one sequence of `tokens` holds."""
        kept = sum(c.token_bytes * min(tokens, c.window_tokens or tokens) for c in self.caches)
        return kept + self.state_bytes

    def rank_token_bytes(self, ranks: int) -> int:
        """Bytes of `token_bytes` that each of `ranks` tensor-parallel ranks holds.

        A latent (MLA) is copied to every rank, and KV heads fewer than ranks are copied too.
        """
        if ranks < 1:
            raise ConfigError(f"must be at least 1, not {ranks}", path="$.hardware.count")
        growing = (c for c in self.caches if c.window_tokens is None)
        return sum(c.token_bytes * -(-c.heads // ranks) // c.heads for c in growing)

    def prefill_flops(self, new_tokens: int, cached_tokens: int) -> float:
        """FLOPs to compute `new_tokens` after `cached_tokens` whose KV is there."""
        end = cached_tokens + new_tokens
        flops = 2.0 * self.parameters.active * new_tokens
        for part in self.attentions:
            seen = _seen(end, part.seen_tokens) - _seen(cached_tokens, part.seen_tokens)
            flops += 2.0 * part.layers * part.dims * seen
        return flops

    @property
    def quadratic_flops(self) -> float:
        """FLOPs/token²: the factor of `n² - p²`, from layers that see the whole context."""
        return sum(float(a.layers * a.dims) for a in self.attentions if a.seen_tokens is None)

    @property
    def linear_flops(self) -> float:
        """FLOPs/token far from the start: the weights, and attention that sees a bounded part."""
        bounded = sum(2.0 * a.layers * a.dims * a.seen_tokens for a in self.attentions
                      if a.seen_tokens is not None)  # fmt: skip
        return 2.0 * self.parameters.active + bounded


def shape_from_config(
    config: object, *, name: str = "", kv_dtype: str = "auto", published: Parameters | None = None
) -> ModelShape:
    """The shape of a model from its Hugging Face config (a dict, or an object with `to_dict`).

    Args:
        kv_dtype: element type of the cache; `auto` is the type of the activations.
        published: parameter counts where they are known better than by counting.

    Raises:
        UnsupportedError: a field is missing, or the model keeps a state that cannot be sized.
        ConfigError: an unknown `kv_dtype`.
    """
    found = settings(config)
    _refuse(found)
    layers = integer(found, LAYERS)
    itemsize = _itemsize(found, kv_dtype)
    kinds = [k for k in layer_kinds(found, layers) if k in ATTENTION_KINDS]
    state_layers = recurrent_layers(found, layers)
    if state_layers is not None:
        attending = state_layers.attention
        kinds = kinds[:attending] if len(kinds) >= attending else ["full_attention"] * attending
    parameters = published or count_parameters(found, layers, state_layers)
    label = name or str(found.get("_name_or_path") or found.get("model_type") or "model")
    return ModelShape(
        name=label,
        layers=layers,
        parameters=parameters,
        weight_bytes=int(parameters.total * _weight_bytes(found)),
        caches=tuple(_caches(found, kinds, itemsize)),
        attentions=tuple(_attentions(found, kinds)),
        state_bytes=recurrent_state_bytes(found, state_layers, itemsize) if state_layers else 0,
    )


def head_sizes(found: Settings) -> tuple[int, int, int]:
    """(query heads, KV heads, head size) of a layer without latent attention."""
    heads = integer(found, HEADS)
    size = found.get("head_dim") or integer(found, HIDDEN) // heads
    return heads, kv_heads(found, heads), int(size)


def _seen(tokens: int, limit: int | None) -> float:
    """Pairs of a token and one that it sees, over the first `tokens` of a sequence."""
    if limit is None or tokens <= limit:
        return tokens * tokens / 2
    return limit * limit / 2 + float(limit) * (tokens - limit)


def _groups(found: Settings, kinds: list[str]) -> Iterator[tuple[int, int | None]]:
    """(layers, window) of the attending layers: those that see all, then those with a window."""
    window, chunk = window_tokens(found), found.get("attention_chunk_size")
    spans = [
        window if k == "sliding_attention" else chunk if k == "chunked_attention" else None
        for k in kinds
    ]
    for span in sorted(set(spans), key=lambda s: (s is not None, s or 0)):
        yield spans.count(span), span


def _caches(found: Settings, kinds: list[str], itemsize: int) -> Iterator[Cache]:
    own = kinds[: len(kinds) - int(found.get("num_kv_shared_layers") or 0)]
    if found.get("kv_lora_rank"):
        latent = int(found["kv_lora_rank"]) + int(found.get("qk_rope_head_dim") or 0)
        yield Cache(len(own), latent * itemsize, 1)
        if found.get("index_head_dim"):
            indexed = int(found["index_head_dim"]) + _INDEXER_SCALE_BYTES
            yield Cache(len(own), indexed, 1, indexer=True)
        return
    _, heads, size = head_sizes(found)
    for layers, window in _groups(found, own):
        if window is None and found.get("global_head_dim"):  # Gemma 4: other heads see all
            size_here = int(found["global_head_dim"])
            heads_here = int(found.get("num_global_key_value_heads") or heads)
        else:
            size_here, heads_here = size, heads
        yield Cache(layers, 2 * heads_here * size_here * itemsize, heads_here, window)


def _attentions(found: Settings, kinds: list[str]) -> Iterator[Attention]:
    if found.get("kv_lora_rank"):
        heads = integer(found, HEADS)
        query = int(found.get("qk_nope_head_dim") or 0) + int(found.get("qk_rope_head_dim") or 0)
        dims = heads * (query + int(found.get("v_head_dim") or query))
        yield Attention(len(kinds), dims, found.get("index_topk"))
        if found.get("index_topk"):
            indexer = int(found.get("index_n_heads") or 1) * int(found["index_head_dim"])
            yield Attention(len(kinds), indexer)
        return
    heads, _, size = head_sizes(found)
    for layers, window in _groups(found, kinds):
        here = int(found.get("global_head_dim") or size) if window is None else size
        yield Attention(layers, 2 * heads * here, window)


def _itemsize(found: Settings, kv_dtype: str) -> int:
    spelt = {"auto": _activation_dtype(found), "fp8": "float8_e4m3", "fp16": "float16",
             "bf16": "bfloat16"}.get(kv_dtype, kv_dtype)  # fmt: skip
    if spelt not in DTYPE_BYTES:
        known = ", ".join(["auto", *DTYPE_BYTES])
        raise ConfigError(f"unknown dtype {kv_dtype!r}", path="$.kv_dtype", remedy=f"use {known}")
    return DTYPE_BYTES[spelt]


def _activation_dtype(found: Settings) -> str:
    dtype = str(found.get("dtype") or found.get("torch_dtype") or "bfloat16")
    spelt = dtype.removeprefix("torch.")
    # vLLM serves float32 checkpoints in half precision unless told otherwise.
    return spelt if spelt in DTYPE_BYTES and spelt != "float32" else "bfloat16"


def _weight_bytes(found: Settings) -> float:
    """Bytes of one weight: half precision unless the config says that it is quantised."""
    method: Any = found.get("quantization_config") or {}
    if not method:
        return 2.0
    bits = method.get("bits")
    kind = str(method.get("quant_method") or "")
    if isinstance(bits, int) and 0 < bits <= 16:
        return bits / 8
    return {"fp8": 1.0, "mxfp4": 0.53, "nvfp4": 0.56, "awq": 0.5, "gptq": 0.5}.get(kind, 1.0)


def _refuse(found: Settings) -> None:
    if found.get("is_encoder_decoder"):
        raise UnsupportedError("encoder-decoder models", remedy="use a decoder-only model")
    lists = [n for n in ("head_dim", "num_key_value_heads") if isinstance(found.get(n), list)]
    odd = [*lists, *(n for n in ("block_configs", "use_cla") if found.get(n))]
    odd += [str(n) for n in found if str(n).startswith("swa_") and found[n] is not None]
    if odd:
        raise UnsupportedError(
            f"KV heads that differ between layers ({odd[0]})",
            remedy="name a model of the catalogue, or one whose layers are alike",
        )
