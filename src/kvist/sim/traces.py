"""A trace in memory, and Mooncake's format of it in a file.

A file is told by its first record, not by its name; `.gz` is unpacked. Formats that carry no ids of
blocks but text, tokens or components get chained keys (`formats.py`); those that carry only lengths
give every request blocks of its own, so nothing is ever reused.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from kvist.core.errors import FormatError
from kvist.core.hints import Finish
from kvist.core.keys import Key

_USUAL_BLOCK_TOKENS = (512, 256, 128, 64, 32, 16, 1024)
_SAMPLE = 200  # requests from which the block size is told
_TICK = 2000  # lines between two calls of `progress`
BACK_S = 60.0  # how far times may go back in a file

Progress = Callable[[int], None]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Request:
    """One request: a chain of blocks, of which the last may be partial."""

    time_s: float
    keys: tuple[Key, ...]  # from the root; each one's parent is the key before it
    input_tokens: int
    output_tokens: int | None = None
    finish: Finish = Finish.UNKNOWN
    session: str = ""
    # What the prompt is made of, in order: (part, its tokens); equal parts are equal text. Empty
    # where the trace does not say.
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    block_tokens: int
    requests: tuple[Request, ...]
    unique_blocks: int
    accesses_blocks: int
    # Share of input tokens in a part (passage, turn, ...) that came before, at whatever place of
    # the prompt; None where the requests do not say what they are made of.
    repeated_tokens_ratio: float | None = None

    @staticmethod
    def of(
        name: str,
        block_tokens: int,
        requests: list[Request],
        *,
        repeated_tokens_ratio: float | None = None,
    ) -> Trace:
        """A trace with its totals; `requests` are put in order of time."""
        ordered = sorted(requests, key=lambda request: request.time_s)
        unique = len({key for request in ordered for key in request.keys})
        accesses = sum(len(request.keys) for request in ordered)
        return Trace(name, block_tokens, tuple(ordered), unique, accesses, repeated_tokens_ratio)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file, with where it stands for error messages."""

    path: Path
    number: int
    text: bytes

    def fault(self, message: str) -> FormatError:
        """The error of this line."""
        return FormatError(f"{self.path}, line {self.number}: {message}")

    def decode(self, kind: type[_T]) -> _T:
        """The line's JSON as `kind`.

        Raises:
            FormatError: it is no such record; names file, line and field.
        """
        try:
            return msgspec.json.decode(self.text, type=kind, strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.fault(str(error)) from error


class Arrivals:
    """The clock of one file: its times are real, and go back by at most `back_s` seconds.

    Servers log requests as they end, so neighbours may stand in the wrong order, which
    `Trace.of` mends. A larger step back is a second trace in the file, or a broken clock.
    """

    __slots__ = ("_back_s", "_field", "_latest_s")

    def __init__(self, field: str, back_s: float = BACK_S) -> None:
        self._field = field
        self._back_s = back_s
        self._latest_s = 0.0

    def checked(self, line: Line, time_s: float) -> float:
        """`time_s` as it is.

        Raises:
            FormatError: it is negative, not finite, or too far before an earlier line's.
        """
        if not 0 <= time_s < math.inf:
            raise line.fault(f"`{self._field}` is negative or no number: {time_s:g} s")
        back_s = self._latest_s - time_s
        if back_s > self._back_s:
            raise line.fault(
                f"`{self._field}` goes back by {back_s:,.1f} s (up to {self._back_s:g} s is "
                "put in order); sort the file by time"
            )
        self._latest_s = max(self._latest_s, time_s)
        return time_s


class _Mooncake(msgspec.Struct):
    """Mooncake's schema with the optional fields of ours, of Dynamo's and of Bailian's."""

    timestamp: float
    input_length: int
    hash_ids: list[int | str]
    output_length: int | None = None
    session: int | str | None = None
    session_id: int | str | None = None
    chat_id: int | str | None = None  # Bailian's, whose timestamps are seconds
    cls: int | None = None


def lines_of(path: Path, progress: Progress | None = None) -> Iterator[Line]:
    """The lines that are not empty; `progress` gets the number of lines so far.

    Raises:
        FormatError: the file is no gzip stream although its name says so.
        OSError: it cannot be read.
    """
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for number, text in enumerate(file, 1):
                if progress is not None and number % _TICK == 0:
                    progress(number)
                if stripped := text.strip():
                    yield Line(path, number, stripped)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise FormatError(f"{path}: damaged gzip: {error}") from error


def first_fields(line: Line) -> frozenset[str]:
    """Names of the fields of a JSON object; empty if the line is something else."""
    try:
        record = json.loads(line.text)
    except ValueError:
        return frozenset()
    return frozenset(record) if isinstance(record, dict) else frozenset()


def read_mooncake(
    lines: Iterator[Line],
    name: str,
    *,
    block_tokens: int | None = None,
    back_s: float = BACK_S,
) -> Trace:
    """Reads `timestamp`, `input_length`, `output_length`, `hash_ids`, `session`, `cls`.

    Args:
        block_tokens: size of a block; else the usual one that explains the number of ids of
            every request.
        back_s: see `Arrivals`.

    Raises:
        FormatError: a record is none of these; names file, line and field.
    """
    keys: dict[int | str, Key] = {}  # one object an id, so that looking one up is quick
    requests: list[Request] = []
    arrivals = Arrivals("$.timestamp", back_s)
    for line in lines:
        record = line.decode(_Mooncake)
        if record.input_length < 0:
            raise line.fault("`$.input_length` is negative")
        if record.output_length is not None and record.output_length < 0:
            raise line.fault("`$.output_length` is negative")
        if record.cls is not None and record.cls not in Finish._value2member_map_:
            raise line.fault(f"`$.cls` is {record.cls}, not one of 0, 1, 2, 3")
        chain = []
        for block_id in record.hash_ids:
            key = keys.get(block_id)
            if key is None:
                key = keys[block_id] = str(block_id).encode()
            chain.append(key)
        session = next(
            (s for s in (record.session, record.session_id, record.chat_id) if s is not None), ""
        )
        requests.append(
            Request(
                time_s=arrivals.checked(
                    line, record.timestamp / (1.0 if record.chat_id is not None else 1000.0)
                ),
                keys=tuple(chain),
                input_tokens=record.input_length,
                output_tokens=record.output_length,
                finish=Finish.UNKNOWN if record.cls is None else Finish(record.cls),
                session=str(session),
            )
        )
    return Trace.of(name, block_tokens or _block_tokens(requests), requests)


def _block_tokens(requests: list[Request]) -> int:
    sample = [r for r in requests if r.keys][:_SAMPLE]

    def explained(size: int) -> int:
        return sum(-(-r.input_tokens // size) == len(r.keys) for r in sample)

    return max(_USUAL_BLOCK_TOKENS, key=explained)
