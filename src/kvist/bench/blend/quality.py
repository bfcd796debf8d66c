"""How far blended KV moves the next-token distributions from those of full prefill.

Passages are computed each alone, moved to where they stand in the prompt, and repaired at several
ratios. Per prompt: KL(full || blended), in nats, after the last token of the question and as a mean
over the question's tokens. Every prompt is a line of a file, so a run that was ended goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvist.accel.blend.relocate import relocate
from kvist.accel.blend.repair import repair
from kvist.accel.blend.schedule import RepairPlan
from kvist.accel.blend.transformers_model import TransformersBlendModel
from kvist.bench.blend.prompts import PassagePrompt

if TYPE_CHECKING:
    from torch import Tensor

RATIOS = (0.0, 0.05, 0.15, 0.3, 0.6, 1.0)


class Measured(msgspec.Struct, frozen=True):
    """A prompt at one ratio: KL in nats, whether the likeliest next token is the same."""

    kl_last: float
    kl_question: float
    agrees: bool
    deviation_ratio: float
    repaired_tokens: int
    pass_s: float


class PromptRow(msgspec.Struct, frozen=True):
    """A prompt: its sizes, the time of full prefill, and what each ratio gave."""

    name: str
    tokens: int
    cached_tokens: int
    question_tokens: int
    full_s: float
    ratios: dict[str, Measured]


def measure(
    model: TransformersBlendModel,
    prompts: Sequence[PassagePrompt],
    file: Path,
    *,
    ratios: Sequence[float] = RATIOS,
    said: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[PromptRow]:
    """Measures what `file` does not hold yet, and gives all rows in the order of `prompts`."""
    done = _read(file, ratios)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        if file.stat().st_size and not file.read_bytes().endswith(b"\n"):
            out.write("\n")  # a run that was killed may have left half a line
        for number, prompt in enumerate(prompts):
            if prompt.name not in done:
                row = measure_prompt(model, prompt, ratios)
                out.write(msgspec.json.encode(row).decode() + "\n")
                out.flush()
                done[prompt.name] = row
            said(number + 1, len(prompts))
    return [done[prompt.name] for prompt in prompts]


def measure_prompt(
    model: TransformersBlendModel, prompt: PassagePrompt, ratios: Sequence[float] = RATIOS
) -> PromptRow:
    """One prompt at every ratio."""
    import torch

    tokens = torch.tensor(prompt.tokens)
    keys, values, cached = stored_passages(model, prompt)
    began_s = time.perf_counter()
    _, _, full = model.own_pass(tokens)
    full_s = time.perf_counter() - began_s
    asks = len(prompt.question)
    found = {}
    for ratio in ratios:
        began_s = time.perf_counter()
        blended = repair(
            model, tokens, keys.clone(), values.clone(), cached, RepairPlan(float(ratio))
        )
        pass_s = time.perf_counter() - began_s
        with torch.no_grad():
            logits = model.logits(blended.hidden[-asks:])
        divergence = kl_nats(full[-asks:], logits)
        found[f"{ratio:g}"] = Measured(
            kl_last=float(divergence[-1]),
            kl_question=float(divergence.mean()),
            agrees=bool(full[-1].argmax() == logits[-1].argmax()),
            deviation_ratio=blended.deviation_ratio,
            repaired_tokens=blended.repaired_tokens,
            pass_s=pass_s,
        )
    return PromptRow(prompt.name, len(tokens), int(cached.sum()), asks, full_s, found)


def stored_passages(
    model: TransformersBlendModel, prompt: PassagePrompt
) -> tuple[Tensor, Tensor, Tensor]:
    """KV of a prompt whose passages were each computed alone, and then moved.

    Returns:
        keys and values `[layers, kv_heads, tokens, head_dim]`, 0 where nothing was cached, and
        `[tokens]` bool: what was.
    """
    import torch

    shape, total = model.shape, len(prompt.tokens)
    keys = torch.zeros((shape.layers, shape.kv_heads, total, shape.head_dim))
    values, cached = torch.zeros_like(keys), torch.zeros(total, dtype=torch.bool)
    for (start, stop), passage in zip(prompt.spans(), prompt.passages, strict=True):
        k, v, _ = model.own_pass(torch.tensor(passage))
        here = torch.arange(stop - start)
        for layer in range(shape.layers):
            keys[layer, :, start:stop] = relocate(k[layer], here, here + start, model.rope(layer))
        values[:, :, start:stop] = v
        cached[start:stop] = True
    return keys, values, cached


def kl_nats(full: Any, other: Any) -> Any:
    """KL(full || other) of rows of logits `[n, vocabulary]`, in nats; `[n]`."""
    log_full, log_other = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return (log_full.exp() * (log_full - log_other)).sum(-1)


def _read(file: Path, ratios: Sequence[float]) -> dict[str, PromptRow]:
    if not file.is_file():
        return {}
    wanted = {f"{ratio:g}" for ratio in ratios}
    rows: Mapping[str, PromptRow] = {
        row.name: row
        for line in file.read_text(encoding="utf-8").splitlines()
        if _whole(line) and (row := msgspec.json.decode(line, type=PromptRow))
    }
    return {name: row for name, row in rows.items() if wanted <= set(row.ratios)}


def _whole(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
