"""Turns samples into rows, and rows into a table. MB are 1,000,000 bytes, seconds of one core."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvist.bench.quality.measures import perplexity
from kvist.bench.quality.samples import AnswerSample, CodecRow, CodecSample, Result, SampleLog


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: its title, its columns, and its rows of text; the first column is to the left."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def codec_row(name: str, log: SampleLog) -> CodecRow:
    """A codec over all that was measured of it; every position counts the same."""
    samples = log.codecs(name)
    fault = next((f"text {s.context + 1}: {s.fault}" for s in samples if s.fault), "")
    sound = [s for s in samples if not s.fault]
    row = _with_answers(CodecRow(codec=name, contexts=len(sound), fault=fault), log.answers(name))
    return _with_contexts(row, sound) if sound else row


def _with_contexts(row: CodecRow, samples: Sequence[CodecSample]) -> CodecRow:
    kl = np.array([v for s in samples for v in s.kl_nats])
    surprise = np.array([v for s in samples for v in s.surprise_nats])
    raw_bytes = sum(s.raw_bytes for s in samples)
    greedy = sum(s.greedy_tokens for s in samples)
    return msgspec.structs.replace(
        row,
        positions=len(kl),
        raw_bytes=raw_bytes,
        stored_bytes=sum(s.stored_bytes for s in samples),
        kl_nats_mean=digits(float(np.mean(kl)), 4),
        kl_nats_p95=digits(float(np.quantile(kl, 0.95, method="higher")), 4),
        perplexity=digits(perplexity(surprise), 6),
        top1_ratio=digits(sum(s.same_top for s in samples) / len(kl), 5),
        greedy_ratio=digits(sum(s.greedy_same_tokens for s in samples) / greedy, 5),
        encode_mb_s=_speed(raw_bytes, sum(s.encode_s for s in samples)),
        decode_mb_s=_speed(raw_bytes, sum(s.decode_s for s in samples)),
    )


def _with_answers(row: CodecRow, answers: Sequence[AnswerSample]) -> CodecRow:
    if not answers:
        return row
    return msgspec.structs.replace(
        row,
        questions=len(answers),
        f1=digits(sum(a.f1 for a in answers) / len(answers), 4),
        exact_ratio=digits(sum(a.exact for a in answers) / len(answers), 4),
    )


def copy_mb_s(log: SampleLog, names: Sequence[str]) -> float | None:
    """Speed of memcpy of the same blocks, over every codec's turn."""
    samples = [s for name in names for s in log.codecs(name) if not s.fault]
    return _speed(sum(s.raw_bytes for s in samples), sum(s.copy_s for s in samples))


def _speed(size_bytes: int, took_s: float) -> float | None:
    return digits(size_bytes / took_s / 1e6, 4) if took_s > 0 else None


def digits(value: float, count: int) -> float:
    """`value` with `count` significant digits: no more are kept."""
    return float(f"{value:.{count}g}")


def codec_grid(result: Result) -> Grid:
    """Codecs by size, largest first."""
    asked = any(row.questions for row in result.codecs)
    columns = ["codec", "size", "KL mean", "KL p95", "perplexity", "same top", "same greedy"]
    columns += ["encode MB/s", "decode MB/s", *(["F1", "exact"] if asked else [])]
    rows = []
    for row in sorted(result.codecs, key=lambda r: -(size_ratio(r) or math.inf)):
        cells = [
            row.codec,
            share(size_ratio(row)),
            nats(row.kl_nats_mean),
            nats(row.kl_nats_p95),
            _plain(row.perplexity, ".3f"),
            share(row.top1_ratio),
            share(row.greedy_ratio),
            _plain(row.encode_mb_s, ",.0f"),
            _plain(row.decode_mb_s, ",.0f"),
        ]
        rows.append(cells + ([share(row.f1), share(row.exact_ratio)] if asked else []))
    return Grid("Codecs: a context's KV encoded, decoded, and gone on from", columns, rows)


def notes(result: Result) -> list[str]:
    """What belongs beside the tables."""
    asked = result.settings
    out = [
        f"{asked.model} in float32, KV in bfloat16, blocks of {asked.block_tokens} tokens; "
        f"{asked.contexts} texts of {asked.context_tokens} tokens, {asked.follow_tokens} after "
        f"each, greedy answers of {asked.greedy_tokens}; {asked.questions} questions"
        f"{f'; {asked.prompts} prompts blended' if result.blend else ''}. "
        f"Texts: {', '.join(asked.texts)}."
    ]
    if result.copy_mb_s is not None:
        out.append(f"memcpy of the same blocks: {result.copy_mb_s:,.0f} MB/s of one core.")
    judged = max((row.questions for row in result.blend), default=0)
    if judged:
        out.append(f"F1 and exact match of blend are of {judged} answers.")
    if result.table:
        out.append(f"The table of `cachegen` is {result.table[:16]}….")
    if result.implementation != "native":
        out.append("The native code was off: speeds are those of its Python twins.")
    if not result.complete:
        out.append("The run was interrupted; what it had measured is shown.")
    out += [f"{row.codec}: {row.fault}" for row in result.codecs if row.fault]
    return out


def size_ratio(row: CodecRow) -> float | None:
    """Stored bytes of raw ones; `None` if nothing was measured."""
    return row.stored_bytes / row.raw_bytes if row.raw_bytes else None


def nats(value: float | None) -> str:
    """A divergence for people: 0 is exactly none."""
    return "–" if value is None else "0" if value == 0 else f"{value:.2g}"


def share(value: float | None) -> str:
    """A share of one, in per cent."""
    return "–" if value is None else f"{value:.1%}"


def _plain(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
