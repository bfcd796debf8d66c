"""What a quality run measured: samples as lines of a file, and the result as JSON.

Samples are appended as they are measured, each of one way (a codec, a ratio of blend) on one text,
so that a run that was stopped can go on. The result holds one row a way and is made from them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvist.bench.samples import Machine
from kvist.core.errors import ConfigError

SCHEMA = 1
_MAX_FILE_BYTES = 256 << 20


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was asked of a run; samples of other settings are not mixed with it."""

    model: str
    texts: list[str]
    contexts: int
    context_tokens: int
    follow_tokens: int
    greedy_tokens: int
    block_tokens: int
    questions: int
    answer_tokens: int
    prompts: int = 0  # that are blended


class CodecSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="codec"):
    """One codec on one context. Seconds are of CPU time, over all its blocks.

    `kl_nats` and `surprise_nats` have an entry a position; empty if `fault` says why.
    """

    codec: str
    context: int
    raw_bytes: int
    stored_bytes: int
    encode_s: float
    decode_s: float
    copy_s: float
    kl_nats: list[float] = []
    surprise_nats: list[float] = []
    same_top: int = 0
    greedy_same_tokens: int = 0
    greedy_tokens: int = 0
    fault: str = ""


class AnswerSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="answer"):
    """One answer to one question from KV that went through `way`."""

    way: str
    question: int
    answer: str
    f1: float
    exact: bool


class BlendSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="blend"):
    """One prompt of `tokens` at one ratio, or its `full` prefill, beside the full prefill.

    `kl_nats` has an entry for each token of the question. `f1` and `exact` are `None` where the
    question's own passages were cut.
    """

    way: str
    prompt: int
    tokens: int
    cached_tokens: int
    question_tokens: int
    repaired_tokens: int
    kl_nats: list[float]
    same_top: int
    greedy_same_tokens: int
    greedy_tokens: int
    answer: str = ""
    f1: float | None = None
    exact: bool | None = None


class TableMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="table"):
    """The one table that all samples of `cachegen` in a file are of."""

    table: str


Sample = CodecSample | AnswerSample | BlendSample


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="head"):
    """First line of a file of samples."""

    settings: Settings
    schema: int = SCHEMA


class CodecRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One codec over all its contexts and questions; `None` where nothing was measured.

    `fault` says why a codec could not be measured on a context. `f1` and `exact_ratio` are of
    `questions` answers.
    """

    codec: str
    contexts: int = 0
    positions: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    kl_nats_mean: float | None = None
    kl_nats_p95: float | None = None
    perplexity: float | None = None
    top1_ratio: float | None = None
    greedy_ratio: float | None = None
    encode_mb_s: float | None = None
    decode_mb_s: float | None = None
    questions: int = 0
    f1: float | None = None
    exact_ratio: float | None = None
    fault: str = ""


class BlendRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One way to serve the prompts: `full`, `prefix-only`, or a ratio of blend.

    `computed_ratio` is the share of the prompts' tokens that was computed, as a mean over layers.
    `kl_nats_mean` is over the tokens of the questions, `kl_nats_answer` at the last of them, which
    begins the answer.
    """

    way: str
    prompts: int
    positions: int
    computed_ratio: float
    kl_nats_mean: float
    kl_nats_p95: float
    kl_nats_answer: float
    top1_ratio: float
    greedy_ratio: float
    questions: int = 0
    f1: float | None = None
    exact_ratio: float | None = None


class Result(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A run. `copy_mb_s` is memcpy of the same blocks in the same run, MB/s of one core.

    `implementation` is `native`, or `python` where the twins were measured in its place. `table` is
    the id of the table that `cachegen` was given.
    """

    started: str
    machine: Machine
    settings: Settings
    schema: int = SCHEMA
    took_s: float = 0.0
    complete: bool = False
    implementation: str = "native"
    table: str = ""
    copy_mb_s: float | None = None
    codecs: list[CodecRow] = []
    blend: list[BlendRow] = []


class SampleLog:
    """The samples of a run, in memory and, if it has a path, in a file; one writer."""

    def __init__(self, settings: Settings, path: Path | None = None) -> None:
        """Opens or makes the file and reads what it holds.

        Raises:
            ConfigError: the file holds samples of other settings, or something else.
            OSError: it cannot be read or made.
        """
        self._path = path
        self._known: dict[tuple[type, str, int], Sample] = {}
        self._table = ""
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            for line in _read_lines(path, settings):
                if isinstance(line, TableMark):
                    self._table = line.table
                elif not getattr(line, "fault", ""):  # a fault may have been mended since
                    self._known[_name(line)] = line
        else:
            _append(path, Head(settings))

    def add(self, sample: Sample) -> None:
        """Keeps a sample; in the file it is whole or absent after a crash."""
        self._known[_name(sample)] = sample
        if self._path is not None:
            _append(self._path, sample)

    def use_table(self, table: str) -> None:
        """Says by which table what is added from now on was coded.

        Raises:
            ConfigError: the file has samples of another one.
        """
        if self._table and self._table != table:
            raise ConfigError(
                f"{self._path} holds samples of another table", remedy="name another file"
            )
        if not self._table and self._path is not None:
            _append(self._path, TableMark(table))
        self._table = table

    def has(self, kind: type, way: str, number: int) -> bool:
        """Whether the sample was measured, now or before."""
        return (kind, way, number) in self._known

    def codecs(self, name: str) -> list[CodecSample]:
        """What was measured of a codec, by context."""
        found = [s for s in self._known.values() if isinstance(s, CodecSample) and s.codec == name]
        return sorted(found, key=lambda s: s.context)

    def answers(self, way: str) -> list[AnswerSample]:
        """The answers from a way, by question."""
        found = [s for s in self._known.values() if isinstance(s, AnswerSample) and s.way == way]
        return sorted(found, key=lambda s: s.question)

    def blended(self, way: str) -> list[BlendSample]:
        """What was measured of a way to serve prompts, by prompt."""
        found = [s for s in self._known.values() if isinstance(s, BlendSample) and s.way == way]
        return sorted(found, key=lambda s: s.prompt)


def _name(sample: Sample) -> tuple[type, str, int]:
    if isinstance(sample, CodecSample):
        return CodecSample, sample.codec, sample.context
    if isinstance(sample, BlendSample):
        return BlendSample, sample.way, sample.prompt
    return AnswerSample, sample.way, sample.question


def _append(path: Path, line: Sample | Head | TableMark) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def _read_lines(path: Path, settings: Settings) -> Iterator[Sample | TableMark]:
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} is too large for a file of samples")
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    lines = raw[:whole].splitlines()
    try:
        head = msgspec.json.decode(lines[0] if lines else b"", type=Head)
        if head.schema != SCHEMA or head.settings != settings:
            raise ConfigError(
                f"{path} holds samples of other settings", remedy="name another file, or remove it"
            )
        for line in lines[1:]:
            yield msgspec.json.decode(line, type=Sample | TableMark)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no file of quality samples: {error}") from error
    if whole < len(raw):  # a line was cut off: measured again, on a line of its own
        os.truncate(path, whole)


def read(path: Path) -> Result:
    """A result that `write` wrote.

    Raises:
        ConfigError: it is something else.
        OSError: it cannot be read.
    """
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} is too large for a quality result")
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no quality result: {error}") from error
    if result.schema != SCHEMA:
        raise ConfigError(f"{path} has schema {result.schema}, this Kvist reads {SCHEMA}")
    return result
