"""Reads what a connector recorded (`connectors/recorder.py` says what stands in such a file)."""

from __future__ import annotations

from collections.abc import Iterator

from kvist.connectors.recorder import VERSION, Header
from kvist.core.errors import FormatError, VersionError
from kvist.sim.traces import Line, Trace, read_mooncake

BACK_S = 3600.0  # a request may be written that long after one that arrived later


def read_header(line: Line) -> Header:
    """The header in the first line of a recording.

    Raises:
        VersionError: a newer Kvist wrote it.
        FormatError: it is no header; names file, line and field.
    """
    header = line.decode(Header)
    if header.kvist_recording > VERSION:
        raise VersionError(
            f"{line.path}, line {line.number}: a recording of version {header.kvist_recording}; "
            f"this Kvist reads {VERSION}"
        )
    if header.block_tokens < 1:
        raise line.fault("`$.block_tokens` must be at least 1")
    return header


def read_recording(first: Line, rest: Iterator[Line], name: str) -> Trace:
    """Reads a recording whose header is `first`.

    Raises:
        FormatError: a bad header or record; names file, line and field.
    """
    header = read_header(first)
    return read_mooncake(_whole(rest), name, block_tokens=header.block_tokens, back_s=BACK_S)


def _whole(lines: Iterator[Line]) -> Iterator[Line]:
    """All lines but a last one that was torn."""
    held: Line | None = None
    for line in lines:
        if held is not None:
            yield held
        held = line
    if held is None:
        return
    try:
        held.decode(dict)
    except FormatError:
        return
    yield held
