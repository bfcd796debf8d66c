"""Every trace format that `kvist replay` reads besides Mooncake's, and telling which one a file is.

Text without a tokenizer counts four bytes as a token: block boundaries differ from an engine's, but
what two prompts share is the same.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvist.connectors.recorder import MAGIC
from kvist.core.errors import FormatError
from kvist.core.keys import Key
from kvist.sim.recording import read_recording
from kvist.sim.traces import (
    Arrivals,
    Line,
    Progress,
    Request,
    Trace,
    first_fields,
    lines_of,
    read_mooncake,
)

_BLOCK_TOKENS = 64
_LENGTHS_BLOCK_TOKENS = 512
_BYTES_PER_TOKEN = 4
_HOUR_S = 3600.0
_KNOWN = (
    "known are recordings, Mooncake, Bailian, RAGPulse, LMCache agent, AIBrix and LLMServingSim "
    "JSON lines, Azure, BurstGPT and Vidur CSV"
)

# RAGPulse's parts in the order of the prompt: name of the file, of its id, of the trace's list.
_COMPONENTS = (
    ("1_sys_prompt.jsonl", "sys_prompt_id", "sys_prompt"),
    ("2_passages.jsonl", "passage_id", "passages_ids"),
    ("3_history.jsonl", "history_id", "history"),
    ("5_web_search.jsonl", "web_search_id", "web_search"),
    ("4_user_input.jsonl", "user_input_id", "user_input"),
)


class _RagPulse(msgspec.Struct):
    timestamp: float
    hash_ids: dict[str, list[int]]
    input_length: int
    output_length: int | None = None
    session_id: str = ""


class _Component(msgspec.Struct):
    token_length: int


class _Agent(msgspec.Struct):
    """LMCache's agent traces: the whole text of each call; microseconds."""

    timestamp: float
    input: str
    output_length: int | None = None
    session_id: str = ""


class _AiBrixCall(msgspec.Struct, rename={"output_tokens": "Output Length"}):
    prompt: str
    output_tokens: int | None = None


class _AiBrix(msgspec.Struct):
    timestamp: float
    requests: list[_AiBrixCall]


class _ServingSim(msgspec.Struct):
    arrival_time_ns: float
    input_tok_ids: list[int]
    output_toks: int | None = None


def read_trace(path: Path, progress: Progress | None = None) -> Trace:
    """Reads a trace, of whatever known format.

    Args:
        path: the file, plain or `.gz`.
        progress: gets the number of lines read, every few thousand.

    Raises:
        FormatError: no format that we know, or a bad record: names file, line and field.
        OSError: the file cannot be read.
    """
    name = path.name.removesuffix(".gz").rsplit(".", 1)[0]
    lines = lines_of(path, progress)
    first = next(lines, None)
    if first is None:
        raise FormatError(f"{path}: the file is empty")
    fields, rest = first_fields(first), itertools.chain([first], lines)
    if MAGIC in fields:
        return read_recording(first, lines, name)
    if "input_tok_ids" in fields:
        clock = Arrivals("$.arrival_time_ns")
        return Trace.of(name, _BLOCK_TOKENS, [_serving_sim(line, clock) for line in rest])
    clock = Arrivals("$.timestamp")
    if "requests" in fields:
        calls = (call for line in rest for call in _aibrix(line, clock))
        return Trace.of(name, _BLOCK_TOKENS, list(calls))
    if "input" in fields:
        return Trace.of(name, _BLOCK_TOKENS, [_agent(line, clock) for line in rest])
    if "hash_ids" in fields and b'"hash_ids": {' in first.text[:400]:
        return _ragpulse(rest, path.parent, name, clock)
    if fields & {"hash_ids", "input_length", "timestamp"} or first.text.startswith(b"{"):
        return read_mooncake(rest, name)
    columns = [c.strip() for c in first.text.decode(errors="replace").split(",")]
    for time, tokens, out in (
        ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
        ("Timestamp", "Request tokens", "Response tokens"),
        ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    ):
        if {time, tokens, out} <= set(columns):
            at = (columns.index(time), columns.index(tokens), columns.index(out))
            return Trace.of(name, _LENGTHS_BLOCK_TOKENS, list(_lengths(lines, at, Arrivals(time))))
    raise first.fault(f"no field of a trace format; {_KNOWN}")


def chained(parts: Iterable[bytes]) -> Iterator[Key]:
    """A key for every part, which also stands for all parts before it."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(4, "little") + part)
        yield state.copy().digest()


def _cut(content: bytes, size_bytes: int) -> tuple[Key, ...]:
    return tuple(
        chained(content[at : at + size_bytes] for at in range(0, len(content), size_bytes))
    )


def _agent(line: Line, clock: Arrivals) -> Request:
    record = line.decode(_Agent)
    content = record.input.encode()
    return Request(
        time_s=clock.checked(line, record.timestamp / 1e6),
        keys=_cut(content, _BLOCK_TOKENS * _BYTES_PER_TOKEN),
        input_tokens=-(-len(content) // _BYTES_PER_TOKEN),
        output_tokens=record.output_length,
        session=record.session_id,
    )


def _aibrix(line: Line, clock: Arrivals) -> Iterator[Request]:
    record = line.decode(_AiBrix)
    time_s = clock.checked(line, record.timestamp / 1e3)
    for call in record.requests:
        content = call.prompt.encode()
        yield Request(
            time_s=time_s,
            keys=_cut(content, _BLOCK_TOKENS * _BYTES_PER_TOKEN),
            input_tokens=-(-len(content) // _BYTES_PER_TOKEN),
            output_tokens=call.output_tokens,
        )


def _serving_sim(line: Line, clock: Arrivals) -> Request:
    record = line.decode(_ServingSim)
    try:
        content = b"".join(token.to_bytes(4, "little") for token in record.input_tok_ids)
    except OverflowError as error:
        raise line.fault("`$.input_tok_ids` holds a number that is no token") from error
    return Request(
        time_s=clock.checked(line, record.arrival_time_ns / 1e9),
        keys=_cut(content, 4 * _BLOCK_TOKENS),
        input_tokens=len(record.input_tok_ids),
        output_tokens=record.output_toks,
    )


def _ragpulse(lines: Iterable[Line], folder: Path, name: str, clock: Arrivals) -> Trace:
    lengths = {
        title: {
            number: line.decode(_Component).token_length
            for line in lines_of(folder / file)
            if (number := line.decode(dict[str, int]).get(field)) is not None
        }
        for file, field, title in _COMPONENTS
    }
    requests = []
    parts = Repeats()
    start_s = latest_s = 0.0
    for line in lines:
        record = line.decode(_RagPulse)
        spans = []
        for _, _, title in _COMPONENTS:
            for number in record.hash_ids.get(title, ()):
                if number not in lengths[title]:
                    raise line.fault(f"`$.hash_ids.{title}` names component {number}, unknown")
                spans.append((number, lengths[title][number]))
        parts.add(spans)
        # The published file is two weeks, one behind the other, each with a clock that starts at 0.
        if record.timestamp < _HOUR_S and latest_s - start_s > 24 * _HOUR_S:
            start_s = latest_s
        latest_s = max(latest_s, start_s + record.timestamp)
        requests.append(
            Request(
                time_s=clock.checked(line, start_s + record.timestamp),
                keys=tuple(chained(component_blocks(spans))),
                input_tokens=sum(tokens for _, tokens in spans),
                output_tokens=record.output_length,
                session=record.session_id,
                parts=tuple(spans),
            )
        )
    return Trace.of(name, _BLOCK_TOKENS, requests, repeated_tokens_ratio=parts.ratio)


class Repeats:
    """Counts tokens of parts (passages, prompts, turns) that came before, wherever they stood."""

    __slots__ = ("_all_tokens", "_repeated_tokens", "_seen")

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._all_tokens = 0
        self._repeated_tokens = 0

    def add(self, spans: Sequence[tuple[int, int]]) -> None:
        """Counts one prompt, made of (part, tokens)."""
        for part, tokens in spans:
            self._all_tokens += tokens
            if part in self._seen:
                self._repeated_tokens += tokens
            self._seen.add(part)

    @property
    def ratio(self) -> float:
        """Repeated tokens over all of them."""
        return self._repeated_tokens / max(1, self._all_tokens)


def component_blocks(spans: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """What each block of a prompt made of (component, tokens) holds: pieces with their place."""
    pieces, room = b"", _BLOCK_TOKENS
    for number, tokens in spans:
        start = 0
        while start < tokens:
            taken = min(room, tokens - start)
            pieces += b"%d:%d+%d;" % (number, start, taken)
            start, room = start + taken, room - taken
            if not room:
                yield pieces
                pieces, room = b"", _BLOCK_TOKENS
    if pieces:
        yield pieces


def _lengths(lines: Iterable[Line], at: tuple[int, int, int], clock: Arrivals) -> Iterator[Request]:
    """Arrivals and lengths only: every block is new."""
    for line in lines:
        cells = line.text.decode(errors="replace").split(",")
        if len(cells) <= max(at):
            raise line.fault(f"{len(cells)} columns, too few")
        try:
            input_tokens, output_tokens = int(cells[at[1]]), int(cells[at[2]])
        except ValueError as error:
            raise line.fault(f"a number of tokens is no integer: {error}") from error
        if input_tokens < 0 or output_tokens < 0:
            raise line.fault("a number of tokens is negative")
        blocks = -(-input_tokens // _LENGTHS_BLOCK_TOKENS)
        yield Request(
            time_s=clock.checked(line, _seconds(line, cells[at[0]].strip())),
            keys=tuple(b"%d.%d" % (line.number, i) for i in range(blocks)),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
        )


def _seconds(line: Line, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        # Azure writes seven digits after the second; Python takes six.
        moment = datetime.datetime.fromisoformat(text[:26])
    except ValueError as error:
        raise line.fault(f"timestamp {text!r} is neither a number nor a date") from error
    return moment.replace(tzinfo=datetime.UTC).timestamp()
